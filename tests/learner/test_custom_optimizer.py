"""Optimizers of the user's own: they move weights as in a loop of torch, and go on exactly."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.lr_scheduler import LambdaLR, ReduceLROnPlateau

from cohort.config import CustomOptimConfig, config_from_dict
from cohort.config.objects import name_callable
from cohort.errors import UserError
from cohort.learner.optimizer import Optimizers
from cohort.ranks.collectives import SINGLE_PROCESS
from cohort.trainer.checkpoint import _save_engine_state, load_engine_state


def net(dtype: torch.dtype = torch.float32) -> nn.Module:
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).to(dtype)
    model[0].bias.requires_grad_(False)
    return model


def gradients(model: nn.Module, step: int) -> None:
    for number, p in enumerate(p for p in model.parameters() if p.requires_grad):
        p.grad = torch.randn(p.shape, generator=torch.Generator().manual_seed(10 * step + number)).to(p.dtype)


def config(use: Callable[..., Any], **args: Any) -> CustomOptimConfig:
    return CustomOptimConfig(use=name_callable(use), args=args)


def with_schedule(params: list[nn.Parameter]) -> tuple[Any, Any]:
    optimizer = torch.optim.NAdam([{"params": params[:1], "lr": 0.1}, {"params": params[1:]}], lr=0.01)
    return optimizer, LambdaLR(optimizer, lambda n: 1 / (n + 1))


class WideLion(torch.optim.Optimizer):
    """Keeps float32 state of bfloat16 weights, and decays them whatever the learning rate is."""

    def __init__(self, params: Any, lr: float = 0.1):
        super().__init__(params, {"lr": lr})

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        with torch.no_grad():
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    mean = state.setdefault("mean", torch.zeros_like(p, dtype=torch.float32))
                    mean.mul_(0.9).add_(p.grad.float())
                    p.mul_(0.99).sub_(mean.sign() * group["lr"])


@pytest.mark.parametrize("use", [with_schedule, torch.optim.Adagrad, WideLion])
def test_as_in_a_loop_of_torch_and_after_a_break(tmp_path: Path, use: Callable[..., Any]):
    dtype = torch.bfloat16 if use is WideLion else torch.float32
    plain, ours = net(dtype), net(dtype)
    made = use([p for p in plain.parameters() if p.requires_grad])
    optimizer, scheduler = made if isinstance(made, tuple) else (made, None)
    optimizers = Optimizers(ours, config(use))
    assert optimizers.custom is not None
    factors = [1.0, 0.5, 0.25, 0.125]  # of the schedule of `train`, which a scheduler replaces
    rates = [group["lr"] for group in optimizer.param_groups]
    for step, factor in enumerate(factors):
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            group["lr"] = rate * factor if scheduler is None else group["lr"]
        assert optimizers.set_learning_rate(factor) == optimizer.param_groups[0]["lr"]
        gradients(plain, step)
        optimizer.step()
        if scheduler is not None:
            scheduler.step()
        gradients(ours, step)
        optimizers.step(factor)
        optimizers.custom.advance()
        for a, b in zip(plain.parameters(), ours.parameters(), strict=True):
            assert torch.equal(a, b), step
        if step == 1:
            _save_engine_state({"optimizer": optimizers.state_dict()}, tmp_path / "optimizer", SINGLE_PROCESS)
            weights = {name: p.clone() for name, p in ours.state_dict().items()}
            ours = net(dtype)
            ours.load_state_dict(weights)
            optimizers = Optimizers(ours, config(use))
            state = {"optimizer": optimizers.state_dict()}
            load_engine_state(tmp_path, state)
            optimizers.load_state_dict(state["optimizer"])
            assert optimizers.custom is not None
            assert all(torch.equal(p, weights[name]) for name, p in ours.state_dict().items())


def test_another_optimizer_does_not_go_on(tmp_path: Path):
    state = {"optimizer": Optimizers(net(), config(with_schedule)).state_dict()}
    _save_engine_state(state, tmp_path / "optimizer", SINGLE_PROCESS)
    for use in (torch.optim.NAdam, torch.optim.RAdam):
        with pytest.raises(
            UserError, match=r"has the state of torch\.optim\.nadam\.NAdam of 1 and 2 weights with .*Lam"
        ):
            load_engine_state(tmp_path, {"optimizer": Optimizers(net(), config(use)).state_dict()})
    with pytest.raises(UserError, match=r"this run has an optimizer of Cohort's; resume with the same optimizer"):
        load_engine_state(tmp_path, {"optimizer": {"state": {}}})


class Averages(torch.optim.SGD):
    """Has more state from its second step on."""

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        super().step()
        for p in self.param_groups[0]["params"]:
            state = self.state[p]
            state["average" if "count" in state else "count"] = torch.zeros(())


def test_state_after_the_first_step_is_not_lost(tmp_path: Path):
    model = net()
    optimizers = Optimizers(model, config(Averages))
    for step in range(2):
        gradients(model, step)
        optimizers.step(1.0)
    _save_engine_state({"optimizer": optimizers.state_dict()}, tmp_path / "optimizer", SINGLE_PROCESS)
    with pytest.raises(UserError, match=r"only after its first step, .*: optimizer\.state\.0\.weight\.average, "):
        load_engine_state(tmp_path, {"optimizer": Optimizers(net(), config(Averages)).state_dict()})


def test_what_cannot_be_used():
    def plateau(params: Any) -> Any:
        optimizer = torch.optim.SGD(params)
        return optimizer, ReduceLROnPlateau(optimizer)

    def of_others(params: Any) -> Any:
        return torch.optim.SGD([*params, nn.Parameter(torch.zeros(1))])

    def of_none(params: Any) -> Any:
        return torch.optim.SGD([{"params": []}])

    class NoClosure(torch.optim.SGD):
        def step(self) -> None:  # type: ignore[override]
            super().step()

    class Unpicklable(LambdaLR):
        def state_dict(self) -> dict[str, Any]:
            return {"rule": lambda n: n}

    def unpicklable(params: Any) -> Any:
        optimizer = torch.optim.SGD(params)
        return optimizer, Unpicklable(optimizer, lambda n: 1.0)

    def by_name(named_parameters: Any) -> Any:
        assert list(named_parameters) == ["0.weight", "2.weight", "2.bias"]
        return None

    for use, args, message in (
        (plateau, {}, r"ReduceLROnPlateau cannot be used, because it is not stepped after each update"),
        (of_others, {}, r"holds parameters that are not trained"),
        (of_none, {}, r"holds none of the trained parameters, which are 0\.weight, 2\.weight"),
        (NoClosure, {}, r"NoClosure\.step does not accept closure=None; define step\(self, c"),
        (unpicklable, {}, r"Unpicklable cannot be used, because its state_dict\(\) cannot be pickled"),
        (by_name, {}, r"must be a torch\.optim\.Optimizer, not NoneType"),
        (torch.optim.SGD, {"rate": 1}, r"optim\.use: 'torch\.optim\.sgd:SGD': TypeError: .*'rate'"),
        (torch.optim.LBFGS, {}, r"LBFGS\.step needs a closure; use another optimizer"),
    ):
        with pytest.raises(UserError, match=message):
            Optimizers(net(), config(use, **args))


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"optim": {"weight_decay": 0.1}}, r"weight_decay: 0\.1 has no effect with name: custom; set it in args"),
        ({"optim": {"offload": True}}, r"offload: True has no effect with name: custom"),
        ({"train": {"learning_rate": 1e-3}}, r"learning_rate: 0\.001 has no effect with optim\.name: custom"),
        ({"model": {"parameter_offload": True}}, r"model\.parameter_offload does not work with optim\.name: custom"),
        ({"algorithm": {"name": "ppo"}}, r"advantage: gae, which needs a critic, does not work with optim\.name"),
    ],
)
def test_keys_without_effect(sections: dict[str, Any], message: str):
    usual: dict[str, Any] = {"model": {"path": "m"}, "data": {"path": "d"}, "rewards": [{"use": "math"}]}
    usual["optim"] = {"name": "custom", "use": "torch.optim:NAdam", "args": {"lr": 1e-5}}
    assert config_from_dict(usual).optim.name == "custom"
    with pytest.raises(UserError, match=message):
        config_from_dict({**usual, **{name: {**usual.get(name, {}), **given} for name, given in sections.items()}})
