"""Law 2 over layers that compute attention themselves: packed rows give what one forward per completion gives."""

from collections.abc import Callable

import pytest
import torch

from cohort.models.activation_checkpointing import enable_gradient_checkpointing
from cohort.models.attention import own_layers
from selection import mostly_slow
from test_law_two import GROUPS, differences, make_law_policy, naive
from test_mixers import PATHS, make_wide_model
from tiny import random_sequences

KINDS = ("Falcon", "Falcon with ALiBi", "BLOOM", "MPT")


@pytest.mark.parametrize(("path", "checkpointing"), [*((path, False) for path in PATHS), ("shared", True)])
@pytest.mark.parametrize("kind", mostly_slow(KINDS, "Falcon", "BLOOM", reason="one with ALiBi and one without"))
def test_float64(kind: str, path: str, checkpointing: bool, monkeypatch: pytest.MonkeyPatch):
    model = make_wide_model(kind, monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert (policy.layout, policy.traits.reason) == ("shared", None)
    if checkpointing:
        enable_gradient_checkpointing(model)
    assert max(differences(PATHS[path](policy, sequences), expected)) < 1e-10


@pytest.mark.parametrize("sabotage", ["places_in_the_row", "no_bias", "unrepeated_slopes"])
def test_what_goes_wrong_is_seen(sabotage: str, monkeypatch: pytest.MonkeyPatch):
    """Negative controls: the comparison fails, and by far."""
    model = make_wide_model("Falcon with ALiBi", monkeypatch)
    sequences = random_sequences(GROUPS)
    expected = naive(model, sequences)
    policy = make_law_policy(model)
    assert max(differences(PATHS["shared"](policy, sequences), expected)) < 1e-10
    SABOTAGES[sabotage](monkeypatch)
    assert min(differences(PATHS["shared"](policy, sequences), expected)) > 0.01


def places_in_the_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """Completions go on after all that is before them in the row."""
    right = own_layers._with_bias

    def counted(query, key, value, bias, scale):
        places = torch.arange(bias.shape[-1]).to(bias)
        slopes = bias.flatten(0, -2)[:, 1]  # the second token of the row has position 1
        return right(query, key, value, slopes[:, None] * places, scale)

    monkeypatch.setattr(own_layers, "_with_bias", counted)


def no_bias(monkeypatch: pytest.MonkeyPatch) -> None:
    right = own_layers._with_bias
    monkeypatch.setattr(own_layers, "_with_bias", lambda q, k, v, bias, scale: right(q, k, v, 0 * bias, scale))


def unrepeated_slopes(monkeypatch: pytest.MonkeyPatch) -> None:
    """The slope of the first head for all heads."""
    right = own_layers._with_bias

    def first(query, key, value, bias, scale):
        return right(query, key, value, bias.flatten(0, -2)[:1].expand(query.shape[1], -1), scale)

    monkeypatch.setattr(own_layers, "_with_bias", first)


SABOTAGES: dict[str, Callable[[pytest.MonkeyPatch], None]] = {
    f.__name__: f for f in (places_in_the_row, no_bias, unrepeated_slopes)
}


def test_positions_are_exact_in_16_bits():
    """A number of 8 significant bits has no position 2,001."""
    query, key, value = (torch.randn(1, 2, 3, 20, dtype=torch.bfloat16) for _ in range(3))
    bias = torch.tensor([[0.0, 3.0, 2001.0], [0.0, 0.75, 500.25]])
    wide = own_layers._with_bias(query, key, value, bias, 20**-0.5)
    assert {x.shape[-1] for x in wide} == {32} and not wide[2][..., 20:].any()
    added = (wide[0][..., 20:].double() @ wide[1][..., 20:].double().mT) * 20**-0.5
    torch.testing.assert_close(added, bias.double()[None, :, None].expand_as(added), rtol=1e-4, atol=0)
    assert (bias.bfloat16() - bias).abs().max() > 0.9
