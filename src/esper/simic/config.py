"""How the policy learns: every knob of PPO with its default, its help and its check. Plain data."""

from typing import Literal, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator


class PPOSettings(BaseModel):
    """How the policy learns from a rollout."""

    model_config = ConfigDict(
        frozen=True, extra="forbid", strict=True, allow_inf_nan=False, use_attribute_docstrings=True
    )

    epochs: int = Field(10, ge=1)
    """passes over one rollout"""
    minibatches: int = Field(8, ge=1)
    """parts that the rows of a rollout are assigned to; growth never cuts a row"""
    gamma: float = Field(0.99, gt=0, le=1)
    """discount of later rewards"""
    gae_lambda: float = Field(0.95, ge=0, le=1)
    """how far advantages look beyond the value's own estimate"""
    clip: float = Field(0.2, gt=0, lt=1)
    """largest relative change of a probability that still pays"""
    clip_mode: Literal["per_head", "joint"] = "per_head"
    """whether each head's ratio is clipped by itself or the product of all relevant ones"""
    value_clip: float = Field(0.2, gt=0)
    """largest paid change of a value, in standard deviations of the returns"""
    value_weight: float = Field(0.5, ge=0)
    """share of the value's loss"""
    entropy: float = Field(0.01, ge=0)
    """bonus for undecided heads at the first decision"""
    entropy_floor: float = Field(0.001, ge=0)
    """the bonus after `anneal_decisions`"""
    lr: float = Field(1e-3, gt=0)
    """learning rate at the first decision"""
    lr_floor: float = Field(1e-4, ge=0)
    """the learning rate after `anneal_decisions`"""
    anneal_decisions: int | None = Field(None, ge=1)
    """decisions over which bonus and rate fall in a straight line; None = the whole training"""
    target_kl: float | None = Field(0.03, gt=0)
    """an update ends before a step whose divergence exceeds 1.5 times this; None = never"""
    max_grad_norm: float = Field(0.5, gt=0)
    """gradients of the whole network are clipped to this norm together"""
    hidden_dim: int = Field(128, ge=1, le=16384)
    """width of encoder and LSTM"""
    head_dim: int = Field(64, ge=1, le=16384)
    """width of the layer inside each head"""
    compile: str | None = None
    """backend for torch.compile of the network while it learns, such as "inductor"; None = not compiled"""

    @model_validator(mode="after")
    def _floors_lie_below(self) -> Self:
        for name in ("entropy", "lr"):
            start, floor = getattr(self, name), getattr(self, f"{name}_floor")
            if floor > start:
                raise ValueError(f"{name}_floor is {floor}, above {name} {start}; it has to be at most that.")
        return self


class PPOConfig(PPOSettings):
    """The same for environments whose episodes have no fixed length. In growth a rollout is N whole episodes."""

    horizon: int = Field(256, ge=1)
    """steps of every environment in one rollout"""


def anneal(start: float, floor: float, decisions: int, over: int | None) -> float:
    """A straight line by decisions made, then the floor: the same after a resume, whatever updates were cut short."""
    if over is None:
        return start
    return start + (floor - start) * min(1.0, decisions / over)
