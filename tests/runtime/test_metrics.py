"""The record of a run: exact CSV, TensorBoard events, continuation."""

import csv
import io
import json
import logging
import time

import numpy as np
import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

from tests.harness import leave
from troupe.common.errors import ConfigError
from troupe.common.runtime.metrics import CSV_HEADER, MetricsWriter, read_rows, tensorboard_tag
from troupe.services.evaluator.video import Recorder, encode_gif, encode_mp4

AT = {"steps": 100, "frames": 400, "updates": 7}


def rows(run_dir):
    with (run_dir / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


def events(run_dir):
    accumulator = EventAccumulator(str(run_dir / "tensorboard"), size_guidance={"scalars": 0, "images": 0})
    accumulator.Reload()
    return accumulator


def test_header_and_rows_are_exact_and_visible_at_once(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add("actor-0", {"train/episode_return": -20.5, "nan": float("nan")}, **AT)
    header, first, second = (tmp_path / "metrics.csv").read_text().splitlines()
    assert header == "wall_s,steps,frames,updates,source,name,value"
    assert first.split(",")[1:] == ["100", "400", "7", "actor-0", "train/episode_return", "-20.5"]
    assert second.endswith(",nan")
    assert writer.last["train/episode_return"] == -20.5
    writer.close()


def test_names_from_peers_cannot_break_the_table(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add('evil,"\n', {"a,b\nc": 1}, **AT)
    writer.close()
    (row,) = rows(tmp_path)
    assert row["source"] == "evil___"
    assert row["name"] == "a_b_c"
    assert row["value"] == "1"


def test_tensorboard_shows_scalars_text_and_film(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add("learner", {"speed/updates_per_s": 12.5}, **AT)
    writer.add("actor-1", {"actor/env_ms": 3, "train/episode_return": 1}, **AT)
    gif = encode_gif(np.zeros((3, 8, 6, 3), np.uint8))
    film = writer.add_video("evaluator", "eval/video", gif, steps=100)
    writer.add_text("config", "seed = 1")
    writer.close()
    shown = events(tmp_path)
    names = {"speed/updates_per_s", "actor/env_ms/actor-1", "train/episode_return", "Returns/training"}
    assert names == set(shown.Tags()["scalars"])
    assert min(names) == "Returns/training"  # TensorBoard shows groups in this order
    (point,) = shown.Scalars("speed/updates_per_s")
    assert (point.step, point.value) == (100, 12.5)
    (image,) = shown.Images("eval/video")
    assert (image.width, image.height) == (6, 8)
    assert image.encoded_image_string == film.read_bytes()
    assert film.name == "eval-video-000000000100.gif"
    assert "config/text_summary" in shown.Tags()["tensors"]


def test_a_film_arrives_encoded_or_not_at_all(tmp_path, caplog):
    writer = MetricsWriter(tmp_path, keep_videos=2)
    gif = np.frombuffer(encode_gif(np.zeros((2, 4, 4, 3), np.uint8)), np.uint8)
    for steps in (1, 2, 3):
        assert writer.add_video("evaluator", "eval/video", gif, steps=steps) is not None
        time.sleep(0.01)
    assert sorted(p.name[-6:] for p in (tmp_path / "videos").iterdir()) == ["02.gif", "03.gif"]
    mp4 = np.frombuffer(encode_mp4(np.zeros((2, 8, 8, 3), np.uint8)), np.uint8)
    film = writer.add_video("evaluator", "eval/video", gif, mp4, steps=9)
    assert film.read_bytes() == mp4.tobytes()
    assert sorted(p.name[-6:] for p in (tmp_path / "videos").iterdir()) == ["03.gif", "09.mp4"]
    with caplog.at_level(logging.WARNING):
        assert writer.add_video("evil", "eval/video", np.zeros(100, np.uint8), steps=4) is None
    assert "ignored a video from evil" in caplog.text
    writer.close()


def test_a_resumed_run_continues_its_clock_and_hides_what_is_past(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer._started -= 1000.0  # as if it had run so long
    for steps in (100, 200, 300):
        writer.add("learner", {"x": steps}, steps=steps, frames=0, updates=0)
    writer.close()
    with (tmp_path / "metrics.csv").open("a") as file:
        file.write("1005.0,400,16")  # killed while it wrote
    writer = MetricsWriter(tmp_path, resumed_steps=200)
    assert 1000 <= writer.wall_s < 1100
    writer.add("learner", {"x": -1}, steps=210, frames=0, updates=0)
    writer.close()
    assert [row["steps"] for row in rows(tmp_path)] == ["100", "200", "300", "210"]
    walls = [float(row["wall_s"]) for row in rows(tmp_path)]
    assert walls == sorted(walls)
    assert (tmp_path / "metrics.csv").read_text().count("wall_s") == 1
    assert [(p.step, p.value) for p in events(tmp_path).Scalars("x")] == [(100, 100), (210, -1)]
    assert len(list((tmp_path / "tensorboard").iterdir())) == 2


@pytest.mark.parametrize(
    "damaged",
    [
        b"2.0,20,0,0,learner,x,",
        b"2.0,20,0,0,learner,x",
        b"2.0,20,0,0,learner,x,2,2",
        b"2.0,20,0,0,learner,x,two",
        b"2.0,20,0,0,learner,x,nan",
        b"2.0,20,0,0,learner,x,-inf",
        b"late,20,0,0,learner,x,2",
        b"nan,20,0,0,learner,x,2",
        b"2.0,twenty,0,0,learner,x,2",
        b"2.0,-20,0,0,learner,x,2",
        "2.0,\u00b2,0,0,learner,x,2".encode(),
        b"2.0,20,0,\xff,learner,x,2",
        b"\x00\xff\xfe",
        b"",
    ],
)
def test_damaged_rows_are_passed_over_and_those_around_them_are_not(tmp_path, damaged):
    whole = (b"1.5,10,40,3,actor-0,x,1.25", b"3,30,120,9,learner,y,-7")
    path = tmp_path / "metrics.csv"
    path.write_bytes(b"\n".join([CSV_HEADER.encode(), whole[0], damaged, whole[1], b""]))
    assert list(read_rows(path)) == [
        (1.5, 10, 40, 3, "actor-0", "x", 1.25),
        (3.0, 30, 120, 9, "learner", "y", -7.0),
    ]


def test_games_of_evaluations_are_kept_one_by_one(tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add_evaluation(3, [[1, 10], [2.5, 20]], **AT)
    writer.close()
    with (tmp_path / "evaluations.jsonl").open("a") as file:
        file.write('{"wall_s": 1')  # killed while it wrote
    writer = MetricsWriter(tmp_path, resumed_steps=100)
    writer.add_evaluation(4, [[-1, 5]], steps=200, frames=800, updates=9)
    writer.close()
    first, second = map(json.loads, (tmp_path / "evaluations.jsonl").read_text().splitlines())
    assert first.pop("wall_s") >= 0
    assert first == {**AT, "version": 3, "age_s": 0.0, "returns": [1.0, 2.5], "lengths": [10, 20]}
    assert second["version"] == 4


def test_a_film_as_large_as_any_does_not_hold_up_the_loop(tmp_path):
    """Its check sum is made by native code, in little more than the time that a copy takes."""
    from tensorboardX import crc32c

    assert crc32c._crc32c_native is not None


def test_a_directory_that_cannot_be_written_is_one_line(tmp_path):
    (tmp_path / "metrics.csv").mkdir()
    with pytest.raises(ConfigError, match="cannot write metrics"):
        MetricsWriter(tmp_path)


@pytest.mark.parametrize(
    ("source", "name", "tag"),
    [
        ("actor-0", "actor/env_ms", "actor/env_ms"),
        ("actor-12", "actor/env_ms", "actor/env_ms/actor-12"),
        ("actor-12", "train/episode_return", "train/episode_return"),
        ("replay", "replay/items", "replay/items"),
        ("replay-1", "replay/items", "replay/items/replay-1"),
    ],
)
def test_tags(source, name, tag):
    assert tensorboard_tag(source, name) == tag


def test_gif_is_exact_with_few_colours_and_close_with_many():
    from PIL import Image, ImageSequence

    rng = np.random.default_rng(0)
    palette = rng.integers(0, 256, (200, 3), np.uint8)
    few = palette[rng.integers(0, 200, (4, 20, 30))]
    many = rng.integers(0, 256, (2, 40, 40, 3), np.uint8)
    for frames, tolerance in ((few, 6), (many, 80)):
        image = Image.open(io.BytesIO(encode_gif(frames)))
        shown = [np.asarray(frame.convert("RGB")) for frame in ImageSequence.Iterator(image)]
        assert len(shown) == len(frames)
        assert np.abs(np.stack(shown).astype(int) - frames).max() <= tolerance


def test_recorder_thins_scales_and_bounds():
    recorder = Recorder(max_steps=6, max_side=100)
    recorder.begin(60)
    for i in range(20):
        if recorder.due():
            recorder.add(np.full((210, 160, 3), i, np.uint8))
    assert [int(frame[0, 0, 0]) for frame in recorder] == [0, 2, 4]
    assert recorder[0].shape == (70, 54, 3)
    assert not Recorder()
    recorder = Recorder()
    recorder.add(np.zeros((10, 12, 3), np.uint8))
    assert recorder[0].shape == (130, 156, 3)


def test_a_film_has_the_pace_of_its_game():
    for steps_per_s, every, frames_per_s in ((15, 1, 15), (50, 2, 25), (30, 1, 30), (1000, 34, 1000 / 34)):
        recorder = Recorder()
        recorder.begin(steps_per_s)
        assert [i for i in range(100) if recorder.due()] == list(range(0, 100, every))
        assert recorder.frames_per_s == frames_per_s


@pytest.mark.parametrize("rate", [0.0, -1.0, float("inf"), float("nan")])
def test_a_game_that_says_no_pace_has_the_usual_one(rate):
    recorder = Recorder()
    recorder.begin(rate)
    assert [i for i in range(3) if recorder.due()] == [0, 1, 2]
    assert recorder.frames_per_s == 15.0


def test_a_gif_that_is_too_large_loses_frames_but_not_seconds():
    from PIL import Image

    noise = np.random.default_rng(0).integers(0, 256, (40, 64, 64, 3), np.uint8)
    whole = encode_gif(noise, 20.0)
    part = encode_gif(noise, 20.0, len(whole) // 3)
    assert len(part) <= len(whole) // 3
    shown, shorter = Image.open(io.BytesIO(whole)), Image.open(io.BytesIO(part))
    assert (shown.n_frames, shorter.n_frames) == (40, 10)
    assert (shown.info["duration"], shorter.info["duration"]) == (50, 200)


@pytest.mark.parametrize(("height", "width"), [(210, 160), (33, 35), (500, 301)])
def test_mp4_is_h264_that_every_player_shows(height, width):
    import av

    red, blue = np.zeros((2, height, width, 3), np.uint8)
    red[..., 0], blue[..., 2] = 200, 200
    film = encode_mp4([red] * 5 + [blue] * 5, 15.0)
    with av.open(io.BytesIO(film)) as container:
        (stream,) = container.streams.video
        assert (stream.codec_context.name, stream.codec_context.pix_fmt) == ("h264", "yuv420p")
        assert (stream.average_rate, stream.frames) == (15, 10)
        shown = [frame.to_ndarray(format="rgb24") for frame in container.decode(video=0)]
    assert min(shown[0].shape[:2]) >= min(height, width)
    for frame, colour in ((shown[0], (200, 0, 0)), (shown[-1], (0, 0, 200))):
        assert np.abs(frame.astype(int) - colour).max() < 16


def test_gif_refuses_what_is_no_film():
    for frames in (np.zeros((0, 4, 4, 3), np.uint8), np.zeros((2, 4, 4), np.uint8), np.zeros((2, 4, 4, 3))):
        with pytest.raises(ValueError, match="frame"):
            encode_gif(frames)


def test_a_full_disk_loses_rows_but_not_the_training(tmp_path, caplog):
    writer = MetricsWriter(tmp_path)

    class Full:
        def write(self, text):
            raise OSError(28, "No space left on device")

        def close(self):
            pass

    whole, writer._csv = writer._csv, Full()
    writer.add("learner", {"learner/loss": 1.0}, steps=1, frames=1, updates=1)
    writer.add("learner", {"learner/loss": 2.0}, steps=2, frames=2, updates=2)
    assert writer.failed_writes_total == 2
    assert sum("No space left" in record.message for record in caplog.records) == 1
    assert writer.last["learner/loss"] == 2.0
    writer._csv = whole
    writer.add("learner", {"learner/loss": 3.0}, steps=3, frames=3, updates=3)
    writer.close()
    assert "learner/loss,3" in (tmp_path / "metrics.csv").read_text()


@pytest.mark.parametrize(
    "returns",
    [
        [0.1 + 0.2 + 0.3, 0.3 + 0.2 + 0.1],  # of the same rewards: they differ in the last digit
        [200.0, 200.00000000000003],
        [1e16] * 10,
        [1e30] * 10,
        [-1e150, 1e150],
        [0.0, 1e-300],
        [-3.0, -3.0],
        [1e300, 1e300 * (1 + 1e-12)],
    ],
)
def test_returns_of_any_size_and_distance_have_a_histogram(returns, tmp_path):
    writer = MetricsWriter(tmp_path)
    writer.add_evaluation(3, [[one, 10] for one in returns], **AT)
    writer.close()
    assert writer.failed_writes_total == 0
    (event,) = events(tmp_path).Histograms("eval/returns")
    assert sum(event.histogram_value.bucket) == len(returns)
    assert event.histogram_value.min == min(returns)


def test_a_writer_that_raises_anything_is_logged_and_counted_and_the_evaluation_is_kept(tmp_path, caplog):
    writer = MetricsWriter(tmp_path)

    def fails(*arguments):
        raise ValueError("Too many bins for data range")

    writer._events.histogram = fails
    writer.add_evaluation(3, [[1.0, 10]], **AT)
    writer.close()
    assert writer.failed_writes_total == 1
    assert "Too many bins" in caplog.text
    assert '"version": 3' in (tmp_path / "evaluations.jsonl").read_text()


def test_every_record_survives_a_disk_that_is_full_for_a_while(disk, caplog):
    writer = MetricsWriter(disk)
    gif = encode_gif(np.random.default_rng(1).integers(0, 256, (4, 64, 64, 3), np.uint8))

    def write_all(number):
        at = {"steps": number, "frames": number, "updates": number}
        writer.add("learner", {f"learner/value{i}": float(number) for i in range(300)}, **at)
        writer.add_evaluation(number, [[float(number), 10]] * 300, **at)
        writer.add_video("evaluator", "eval/video", gif, steps=number)
        writer.flush()

    write_all(1)
    assert writer.failed_writes_total == 0
    leave(disk, 10_000)  # room for a part of what comes
    for number in range(2, 6):
        write_all(number)
    assert writer.failed_writes_total > 4
    assert "No space left on device" in caplog.text
    (disk / "ballast").unlink()
    write_all(6)  # what was held back may fail once more
    failed = writer.failed_writes_total
    write_all(7)
    assert writer.failed_writes_total == failed
    writer.close()
    assert {1, 7} <= {row.steps for row in read_rows(disk / "metrics.csv")}
    games = [json.loads(line)["version"] for line in (disk / "evaluations.jsonl").read_text().splitlines()]
    assert games[0] == 1
    assert games[-1] == 7
    assert {1, 7} <= {event.step for event in events(disk).Scalars("learner/value0")}
    assert all(film.stat().st_size == len(gif) for film in (disk / "videos").iterdir())


def test_trackers_that_raise_anything_do_not_end_the_training(tmp_path, caplog):
    def track(steps, values):
        raise RuntimeError("no more rows")

    writer = MetricsWriter(tmp_path, track=track)
    writer.add("learner", {"learner/loss": 1.0}, **AT)
    writer.close()
    assert writer.failed_writes_total == 1
    assert "no more rows" in caplog.text
    assert "learner/loss,1" in (tmp_path / "metrics.csv").read_text()
