"""Returns by hand: the definitions, word for word, in slow numpy. Nothing here is shared with the code."""

import numpy as np


def random_sequences(rng, steps=9, batch=5, end=0.3):
    """Arrays `[T, B]` of sequences in which episodes end in both ways."""
    terminated = rng.random((steps, batch)) < end / 2
    truncated = ~terminated & (rng.random((steps, batch)) < end / 2)
    gamma = 0.9
    values = rng.normal(size=(steps + 1, batch))
    final = rng.normal(size=(steps, batch)) * 10
    following = np.where(truncated, final, values[1:])
    return {
        "rewards": rng.normal(size=(steps, batch)),
        "discounts": gamma * (1.0 - terminated),
        "values": values[:-1],
        "next_values": following,
        "continues": 1.0 - (terminated | truncated),
        "bootstrap": values,
        "truncated": truncated,
        "final": final,
    }


def n_step(s, n):
    steps, batch = s["rewards"].shape
    out = np.zeros((steps, batch))
    for b in range(batch):
        for t in range(steps):
            total, factor, k = 0.0, 1.0, t
            while True:
                total += factor * s["rewards"][k, b]
                factor *= s["discounts"][k, b]
                if k - t + 1 == n or k == steps - 1 or not s["continues"][k, b]:
                    out[t, b] = total + factor * s["next_values"][k, b]
                    break
                k += 1
    return out


def horizon(s, t, b):
    """Steps from t to the end of its episode or of the sequence, both included."""
    k = t
    while k < len(s["rewards"]) - 1 and s["continues"][k, b]:
        k += 1
    return k - t + 1


def lambda_return(s, lambda_):
    """The forward view: n-step returns weighted by (1 - lambda) lambda^(n-1), the rest to the longest."""
    steps, batch = s["rewards"].shape
    by_n = [n_step(s, n) for n in range(1, steps + 1)]
    out = np.zeros((steps, batch))
    for b in range(batch):
        for t in range(steps):
            last = horizon(s, t, b)
            for n in range(1, last):
                out[t, b] += (1 - lambda_) * lambda_ ** (n - 1) * by_n[n - 1][t, b]
            out[t, b] += lambda_ ** (last - 1) * by_n[last - 1][t, b]
    return out


def vtrace(s, log_rhos, rho_bar, c_bar, pg_rho_bar, lambda_, trusted=1.0):
    """Equation 1 of Espeholt et al. 2018 as the sum of products that it is, within each episode.

    A step that is not `trusted` has no difference, no trace and no gradient.
    """
    inf = np.inf
    rhos = np.exp(log_rhos)
    rho = trusted * np.minimum(inf if rho_bar is None else rho_bar, rhos)
    c = trusted * lambda_ * np.minimum(inf if c_bar is None else c_bar, rhos)
    pg = trusted * np.minimum(inf if pg_rho_bar is None else pg_rho_bar, rhos)
    steps, batch = log_rhos.shape
    vs, advantages = np.zeros((steps, batch)), np.zeros((steps, batch))
    delta = rho * (s["rewards"] + s["discounts"] * s["next_values"] - s["values"])
    for b in range(batch):
        for t in range(steps):
            vs[t, b] = s["values"][t, b]
            for k in range(t, t + horizon(s, t, b)):
                vs[t, b] += np.prod(s["discounts"][t:k, b]) * np.prod(c[t:k, b]) * delta[k, b]
        for t in range(steps):
            inside = t < steps - 1 and s["continues"][t, b]
            after = vs[t + 1, b] if inside else s["next_values"][t, b]
            target = s["rewards"][t, b] + s["discounts"][t, b] * after
            advantages[t, b] = pg[t, b] * (target - s["values"][t, b])
    return vs, advantages
