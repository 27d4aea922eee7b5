import numpy as np
import pytest
import torch
from torch import nn

from tests.nets.test_torso_names import PICTURES
from troupe.common.agents import make_agent
from troupe.common.config.algorithms import agent_model
from troupe.common.data.instructions import word_ids
from troupe.common.nets.actor_critic import ActorCritic
from troupe.common.nets.initializers import lecun_normal
from troupe.common.nets.language import InstructionEncoder
from troupe.common.nets.q_network import DuelingHead, QNetwork
from troupe.common.nets.recurrent import LstmCore, last_step
from troupe.common.nets.recurrent_q import RecurrentQNetwork
from troupe.common.nets.torsos import PIXEL_TORSOS, HadamaxTorso, make_torso
from troupe.common.rl.normalizers import Normalizer
from troupe.common.spaces import ActionSpec


@pytest.mark.parametrize(
    ("kind", "shape", "features", "parameters"),
    [
        ("nature", (4, 84, 84), 64 * 7 * 7, 77_984),
        ("small", (4, 84, 84), 32 * 9 * 9, 12_336),
        ("wide", (4, 84, 84), 128 * 6 * 6, 113_152),
        ("minatar", (4, 10, 10), 16 * 8 * 8, 592),
        # Twice the layers of nature, each with a norm; 21 x 21, 11 x 11 and 11 x 11 after the poolings.
        ("hadamax", (4, 84, 84), 64 * 11 * 11, 2 * (77_984 + 2 * 160)),
        # 72 x 96 pixels: 36 x 48, 18 x 24, 9 x 12 after the poolings. By section, with biases:
        # 448 + 4 x 2320, 4640 + 4 x 9248, 9248 + 4 x 9248, and the 16 planes' 2320 instead of 448.
        ("deep", (3, 72, 96), 32 * 9 * 12, 97_600),
        ("football", (16, 72, 96), 32 * 5 * 6, 145_712),
        # 1,184 + 4 x 9,248, 18,496 + 4 x 36,928 and 36,928 + 4 x 36,928; pooled to 6 x 6.
        ("btr", (4, 84, 84), 64 * 6 * 6, 389_024),
    ],
)
def test_torsos_have_the_published_shapes(kind, shape, features, parameters):
    torso = make_torso(kind, shape, ())
    assert torso.features == features
    out = torso(torch.rand(2, *shape))
    assert out.shape == (2, features)
    convolutions = [m for m in torso.modules() if isinstance(m, nn.Conv2d)]
    counts = {"nature": 3, "small": 2, "wide": 3, "minatar": 1, "hadamax": 6, "football": 20}
    assert len(convolutions) == counts.get(kind, 15)
    assert sum(p.numel() for p in torso.parameters()) == parameters


def by_hand_convolved(images, weight, bias):
    """A convolution of stride 1, place by place; zeros around, one more behind where their number is odd."""
    filters, _, size, _ = weight.shape
    batch, _, height, width = images.shape
    before = (size - 1) // 2
    around = (before, size - 1 - before)
    padded = np.pad(images, ((0, 0), (0, 0), around, around))
    out = np.zeros((batch, filters, height, width))
    for y in range(height):
        for x in range(width):
            seen = padded[:, :, y : y + size, x : x + size].reshape(batch, -1)
            out[:, :, y, x] = seen @ weight.reshape(filters, -1).T + bias
    return out


def by_hand_pooled(images, size, stride):
    """The largest of each window; windows that reach beyond the picture are of what is in it."""
    *_, height, width = images.shape
    rows, columns = -(-height // stride), -(-width // stride)
    top, left = (
        max(0, (count - 1) * stride + size - side) // 2 for count, side in ((rows, height), (columns, width))
    )
    out = np.zeros((*images.shape[:2], rows, columns))
    for y in range(rows):
        for x in range(columns):
            up, side = y * stride - top, x * stride - left
            window = images[:, :, max(0, up) : up + size, max(0, side) : side + size]
            out[:, :, y, x] = window.max((2, 3))
    return out


@pytest.mark.parametrize("algorithm", ["apex", "policy_gradient", "sac"])
def test_what_hadamax_sees_neither_vanishes_nor_explodes(algorithm):
    agent = make_agent(agent_model(algorithm)(torso="hadamax"), PICTURES)
    torso = next(module for module in agent.net.modules() if isinstance(module, HadamaxTorso))
    for images in (torch.rand(3, 4, 44, 44), (torch.rand(3, 4, 44, 44) < 0.1).float()):
        assert 0.1 < torso(images).square().mean().sqrt() < 10.0


@pytest.mark.parametrize("sides", [(10, 10), (21, 30)])
def test_hadamax_multiplies_two_convolutions_and_takes_the_largest(sides):
    torso = make_torso("hadamax", (3, *sides), ())
    for parameter in torso.parameters():  # biases too, which begin at 0
        nn.init.normal_(parameter, 0.0, 0.1)
    images = np.random.default_rng(0).normal(size=(2, 3, *sides))
    seen = images
    for block, (pool, stride) in zip(torso.blocks, ((4, 4), (2, 2), (3, 1)), strict=True):
        product = 1.0
        for branch in (block.one, block.other):
            weight, bias = (each.detach().double().numpy() for each in branch[0].parameters())
            made = by_hand_convolved(seen, weight, bias)
            mean, deviation = (made.mean((1, 2, 3), keepdims=True), made.std((1, 2, 3), keepdims=True))
            gain, offset = (each.detach().double().numpy()[:, None, None] for each in branch[1].parameters())
            made = gain * (made - mean) / np.sqrt(deviation**2 + 1e-5) + offset
            product = product * 0.5 * made * (1 + np.tanh(np.sqrt(2 / np.pi) * (made + 0.044715 * made**3)))
        seen = by_hand_pooled(product, pool, stride)
    want = np.moveaxis(seen, 1, -1).reshape(2, -1)  # features go pixel by pixel
    got = torso(torch.from_numpy(images).float()).detach().numpy()
    np.testing.assert_allclose(got, want, rtol=1e-3, atol=1e-5 * abs(want).max())


@pytest.mark.parametrize("kind", PIXEL_TORSOS)
def test_a_vector_is_no_picture(kind):
    with pytest.raises(ValueError, match="needs pictures"):
        make_torso(kind, (7,), ())


def test_lecun_normal_has_variance_one_over_fan_in():
    torch.manual_seed(0)
    layer = lecun_normal(nn.Linear(400, 2000))
    assert layer.weight.std().item() * 20 == pytest.approx(1.0, abs=0.01)
    assert layer.weight.abs().max().item() * 20 < 2.3


def test_dueling_head_has_mean_value():
    head = DuelingHead(5, 3, 8)
    x = torch.randn(4, 2, 5)
    hidden = torch.relu(head.hidden(x))
    np.testing.assert_allclose(
        head(x).mean(-1).detach(), head.value(hidden[..., 8:]).squeeze(-1).detach(), rtol=1e-4, atol=1e-6
    )


def test_q_network_keeps_the_order_of_its_weights():
    """Saved optimiser moments are by position."""
    names = list(QNetwork((3,), 2, "mlp", 4, (8,), True).state_dict())
    assert [n.partition(".")[0] for n in names[::2]] == ["torso", "hidden", "advantage", "value"]


# ------------------------------------------------------------------ memory


@pytest.mark.parametrize("layers", [1, 2])
def test_lstm_forgets_exactly_where_an_episode_begins(layers):
    torch.manual_seed(0)
    core = LstmCore(3, 4, layers)
    steps, batch = 9, 5
    inputs, state = torch.randn(steps, batch, 3), torch.randn(batch, core.state_size)
    first = torch.rand(steps, batch) < 0.25
    outputs, end = core(inputs, first, state)
    for b in range(batch):  # one sequence at a time, step by step, from zeros at each beginning
        h, c = (part.clone() for part in core._unpacked(state[b : b + 1]))
        for t in range(steps):
            if first[t, b]:
                h, c = torch.zeros_like(h), torch.zeros_like(c)
            out, (h, c) = core.lstm(inputs[t : t + 1, b : b + 1], (h, c))
            np.testing.assert_allclose(out[0, 0].detach(), outputs[t, b].detach(), rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(core._packed(h, c)[0].detach(), end[b].detach(), rtol=1e-4, atol=1e-6)


def test_lstm_goes_on_from_its_state():
    core = LstmCore(3, 4)
    inputs, first = torch.randn(6, 2, 3), torch.zeros(6, 2, dtype=torch.bool)
    whole, end = core(inputs, first, torch.zeros(2, 8))
    left, middle = core(inputs[:2], first[:2], torch.zeros(2, 8))
    right, last = core(inputs[2:], first[2:], middle)
    np.testing.assert_allclose(torch.cat([left, right]).detach(), whole.detach(), rtol=1e-4, atol=1e-6)
    np.testing.assert_allclose(last.detach(), end.detach(), rtol=1e-4, atol=1e-6)


def test_no_gradient_crosses_the_beginning_of_an_episode():
    core = LstmCore(3, 4)
    inputs = torch.randn(4, 1, 3, requires_grad=True)
    first = torch.tensor([[False], [False], [True], [False]])
    core(inputs, first, torch.zeros(1, 8))[0][2:].sum().backward()
    assert (inputs.grad[:2] == 0).all()
    assert (inputs.grad[2:] != 0).any()


def test_last_step_features():
    first = torch.tensor([False, False, True])
    got = last_step(torch.tensor([2, 0, 1]), torch.tensor([-7.0, 0.5, 3.0]), first, ActionSpec.discrete(3))
    assert got.tolist() == [[0, 0, 1, -1], [1, 0, 0, 0.5], [0, 0, 0, 0]]


# ------------------------------------------------------------------ language


def test_words_are_hashed_the_same_everywhere():
    ids = word_ids("pick up  the red ball", 7)
    assert ids.tolist() == [*(word_ids(w, 1)[0] for w in ("pick", "up", "the", "red", "ball")), -1, -1]
    assert word_ids("123456789", 1)[0] == 0xCBF43926 % 1000  # the check value of CRC-32
    assert len(word_ids("a b c d", 2)) == 2


def test_instruction_is_read_to_its_last_word_and_no_further():
    torch.manual_seed(0)
    encoder = InstructionEncoder()
    short = torch.from_numpy(np.stack([word_ids("go left", 2), word_ids("go", 2), word_ids("", 2)]))
    long = torch.from_numpy(np.stack([word_ids(text, 9) for text in ("go left", "go", "")]))
    one, other = encoder(short), encoder(long)
    assert one.shape == (3, 64)
    np.testing.assert_allclose(one.detach(), other.detach(), rtol=1e-5, atol=1e-7)
    assert not torch.allclose(one[0], one[1])
    assert (one[2] == 0).all()


# ------------------------------------------------------------------ actor-critic


@pytest.mark.parametrize(("torso", "shape"), [("mlp", (6,)), ("shallow", (4, 84, 84)), ("deep", (3, 32, 32))])
@pytest.mark.parametrize("lstm", [0, 16])
def test_a_sequence_is_its_steps_one_after_the_other(torso, shape, lstm):
    torch.manual_seed(0)
    net = ActorCritic(shape, ActionSpec.discrete(5), torso, policy_size=5, hidden_units=32, lstm_units=lstm)
    steps, batch = 4, 3
    obs = torch.rand(steps, batch, *shape)
    if torso != "mlp":
        obs = (255 * obs).to(torch.uint8)
    action = torch.randint(0, 5, (steps, batch))
    reward, first = torch.randn(steps, batch), torch.rand(steps, batch) < 0.3
    state = torch.zeros(batch, net.state_size)
    logits, values, end = net(obs, action, reward, first, state)
    assert logits.shape == (steps, batch, 5)
    for t in range(steps):
        now = slice(t, t + 1)
        one, value, state = net(obs[now], action[now], reward[now], first[now], state)
        np.testing.assert_allclose(one[0].detach(), logits[t].detach(), rtol=1e-3, atol=1e-5)
        np.testing.assert_allclose(value[0].detach(), values[t].detach(), rtol=1e-3, atol=1e-5)
    np.testing.assert_allclose(state.detach(), end.detach(), rtol=1e-3, atol=1e-5)


def test_the_last_step_can_be_hidden():
    obs, zeros = torch.rand(1, 2, 6), torch.zeros(1, 2)
    first, state = torch.zeros(1, 2, dtype=torch.bool), torch.zeros(2, 0)
    for sees in (True, False):
        net = ActorCritic((6,), ActionSpec.discrete(5), "mlp", policy_size=5, see_last_step=sees)
        one = net(obs, zeros.long(), zeros, first, state)[1]
        other = net(obs, zeros.long() + 3, zeros + 1, first, state)[1]
        assert torch.equal(one, other) != sees


@pytest.mark.parametrize("kind", ["policy", "q"])
def test_what_networks_say_is_not_rounded_where_they_compute_in_bfloat16(kind):
    """Values round 100, which are half a unit apart in bfloat16, of features that are computed in it."""
    torch.manual_seed(0)
    body = {"mlp_units": (64,), "see_last_step": False}
    if kind == "policy":
        net = ActorCritic((8,), ActionSpec.discrete(4), "mlp", policy_size=4, **body)
        last = net.head.baseline
    else:
        net = RecurrentQNetwork((8,), ActionSpec.discrete(4), "mlp", head_units=0, **body)
        last = net.head
    with torch.no_grad():
        last.bias.fill_(100.0)
    steps = torch.zeros(1, 256, dtype=torch.int64), torch.zeros(1, 256), torch.zeros(1, 256) > 0
    obs, memory = torch.randn(1, 256, 8), torch.zeros(256, 0)
    with torch.no_grad():
        exact = net(obs, *steps, memory)[:-1]
        with torch.autocast("cpu", torch.bfloat16):
            said = net(obs, *steps, memory)[:-1]
    for ours, theirs in zip(said, exact, strict=True):
        assert ours.dtype == torch.float32
        assert (ours - theirs).abs().max() < 0.02


@pytest.mark.parametrize("shared", [True, False])
def test_new_statistics_of_returns_leave_what_the_baseline_predicts(shared):
    torch.manual_seed(0)
    net = ActorCritic(
        (3,),
        ActionSpec.discrete(2),
        "mlp",
        policy_size=2,
        shared=shared,
        see_last_step=False,
        returns=Normalizer(()),
    )
    inputs = (torch.randn(1, 50, 3), torch.zeros(1, 50, dtype=torch.int64), torch.zeros(1, 50))
    inputs = (*inputs, torch.zeros(1, 50, dtype=torch.bool), torch.zeros(50, 0))
    before = net(*inputs)[1]
    net.observe_returns(torch.randn(40) * 3 + 20)
    assert torch.equal(net(*inputs)[1], before)  # the first say what its values mean
    for batch in (torch.randn(40) * 30 + 700, torch.randn(200) * 0.1 - 5):
        before = net(*inputs)[1]
        predicted = net.returns.inverse(before)
        net.observe_returns(batch)
        after = net(*inputs)[1]
        assert (after - before).abs().max() > 0.1
        torch.testing.assert_close(net.returns.inverse(after), predicted, rtol=1e-3, atol=1e-3)
