"""Seeds of a run's generators."""

from msgspec.structs import replace

from troupe.common.wire.control.member import Welcome

NEW = Welcome(
    config={"run": {"seed": 3}},
    slots=[],
    total_slots=8,
    announce="ipc://x",
    shards=[],
    heartbeat_s=1.0,
    liveness_s=15.0,
    session=1,
    version=-1,
    steps=0,
    updates=0,
    stopping=False,
)


def test_a_new_run_is_seeded_by_its_seed_and_place_alone():
    assert NEW.seed(11, 4) == NEW.seed(12, 4)
    assert NEW.seed(11, 4) != NEW.seed(11, 5)
    assert NEW.seed(11, 4) != replace(NEW, config={"run": {"seed": 4}}).seed(11, 4)


def test_who_joins_later_or_again_draws_something_new():
    later = replace(NEW, steps=1000)
    seeds = {NEW.seed(11, 4), later.seed(11, 4), later.seed(12, 4), replace(NEW, steps=2000).seed(11, 4)}
    assert len(seeds) == 4
    assert later.seed(11, 4) == later.seed(11, 4)
