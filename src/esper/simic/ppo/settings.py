"""How a policy learns from rollouts, as frozen values."""

from typing import Literal, Self

from pydantic import Field, model_validator

from esper.leyline.configuration import Configuration
from esper.tamiyo.policy_files import MOST_WIDTH


class PPOSettings(Configuration):
    """How the policy learns from a rollout."""

    epochs: int = Field(default=10, ge=1, description="passes over one rollout")
    minibatches: int = Field(default=8, ge=1)
    """parts that the rows of a rollout are assigned to; growth never cuts a row"""
    gamma: float = Field(default=0.99, gt=0, le=1, description="discount of later rewards")
    gae_lambda: float = Field(
        default=0.95,
        ge=0,
        le=1,
        description="how far advantages look beyond the value's own estimate",
    )
    clip: float = Field(
        default=0.2,
        gt=0,
        lt=1,
        description="PPO clip range: larger changes of a probability gain nothing",
    )
    clip_mode: Literal["per_head", "joint"] = "per_head"
    """whether each head's ratio is clipped by itself or the product of all relevant ones"""
    value_clip: float = Field(default=0.2, gt=0)
    """largest paid change of a value, in standard deviations of the returns"""
    value_weight: float = Field(default=0.5, ge=0, description="share of the value's loss")
    entropy: float = Field(
        default=0.01, ge=0, description="bonus for undecided heads at the first decision"
    )
    entropy_floor: float = Field(
        default=0.001, ge=0, description="the bonus after `anneal_decisions`"
    )
    lr: float = Field(default=1e-3, gt=0, description="learning rate at the first decision")
    lr_floor: float = Field(
        default=1e-4, ge=0, description="the learning rate after `anneal_decisions`"
    )
    anneal_decisions: int | None = Field(default=None, ge=1, le=2**62)
    """decisions over which bonus and rate fall in a straight line; None = the whole training"""
    target_kl: float | None = Field(default=0.03, gt=0)
    """an update ends before a step whose divergence exceeds 1.5 times this; None = never"""
    max_grad_norm: float = Field(default=0.5, gt=0)
    """gradients of the whole network are clipped to this norm together"""
    hidden_dim: int = Field(
        default=64, ge=1, le=MOST_WIDTH, description="width of encoder and LSTM"
    )
    head_dim: int = Field(
        default=32, ge=1, le=MOST_WIDTH, description="width of the layer inside each head"
    )
    compile: str | None = None
    """backend for torch.compile of the network while it learns, such as "inductor"; None = not
    compiled
    """

    @model_validator(mode="after")
    def _floors_lie_below(self) -> Self:
        for name in ("entropy", "lr"):
            start = getattr(self, name)
            floor = getattr(self, f"{name}_floor")
            if floor > start:
                raise ValueError(
                    f"{name}_floor is {floor}, above {name} {start}; it has to be at most that."
                )
        return self

    def annealed_over(self, decisions: int) -> Self:
        """Return the same settings with `anneal_decisions` filled in where it is None."""
        if self.anneal_decisions is not None:
            return self
        return self.model_copy(update={"anneal_decisions": decisions})

    def annealed(self, name: str, decisions: int) -> float:
        """Return `lr` or `entropy` after so many decisions.

        It is the same after a resume, whatever updates were cut short.
        """
        start: float = getattr(self, name)
        floor: float = getattr(self, f"{name}_floor")
        if self.anneal_decisions is None:
            return start
        return start + (floor - start) * min(1.0, decisions / self.anneal_decisions)


class PPOConfig(PPOSettings):
    """How `esper.learn` learns where episodes have no fixed length.

    In growth a rollout is N whole episodes, so `TrainingConfig.ppo` has no horizon. A value is
    frozen and checked when it is made; an unknown field is refused with the nearest known one.

    >>> import esper
    >>> config = esper.PPOConfig(lr=3e-4, horizon=128)
    >>> config.minibatches
    8
    >>> config.annealed_over(1000).annealed("lr", decisions=0)
    0.0003
    """

    horizon: int = Field(default=256, ge=1, description="steps of every environment in one rollout")
    hidden_dim: int = Field(
        default=128, ge=1, le=MOST_WIDTH, description="width of encoder and LSTM"
    )
    head_dim: int = Field(
        default=64, ge=1, le=MOST_WIDTH, description="width of the layer inside each head"
    )
