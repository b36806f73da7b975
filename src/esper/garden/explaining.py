"""Why a garden's policy did what it did, in words."""

from abc import ABC
from collections.abc import Callable, Sequence
from typing import Any

from esper.episodes import Ask
from esper.kasmina.model import MorphogeneticModel
from esper.leyline.factored_actions import OP_WAIT, Choice
from esper.tamiyo.masks import Masks
from esper.tamiyo.policies import Actions, NetworkPolicy, Policy, Reports, RulePolicy
from esper.tamiyo.readings import Sight
from esper.tamiyo.reasons import Question, describe_choice, explain
from esper.tamiyo.signals import Signals


class Explaining(ABC):
    """The part of a garden that remembers what its policy was last asked, and says why it acted."""

    model: MorphogeneticModel
    policy: Policy
    policy_name: str
    epoch: int
    questions: list[Question]
    choices: list[Choice]

    def why(self) -> str:
        """What the policy read after the last epoch, and what it preferred by how much, in words.

        A trained policy names how likely each op was, the readings that weighed most and what it
        could not read. A reading weighs as much as the logarithm of the op's probability would
        change, to first order, if the reading were as usual in training. Numbers stand as the
        policy reads them (docs/learning.md). The default rule names the test that held it back or
        let it plant; of other rules you read what they chose.

        Example:
            >>> import torch
            >>> from torch import nn
            >>> import esper
            >>> _ = torch.manual_seed(0)
            >>> host = nn.Sequential(nn.Linear(4, 8), nn.ReLU(), nn.Linear(8, 2))
            >>> inputs, labels = torch.randn(32, 4), torch.arange(32) % 2
            >>> garden = esper.grow(host, slots="0", example=inputs)
            >>> print(garden.why())
            Nothing has been decided yet: no step was made since the garden began or was loaded.
            >>> optimizer = torch.optim.SGD(garden.parameters(), lr=0.1)
            >>> garden.attach(optimizer)
            >>> def losses():
            ...     return nn.functional.cross_entropy(
            ...         garden.model(inputs), labels, reduction="none"
            ...     )
            >>> _ = garden.step(losses, train_loss=0.7)
            >>> print(garden.why())
            epoch 1: heuristic chose GERMINATE lora (linear) in r0c0 (0).
            No test held it back: the slots with the fewest fossils, 0, come first, and the \
largest of 1 candidate is planted.
            It read the training loss 0.7 and the held-out loss 0.717; the loss of guessing is not \
known.
        """
        if not self.questions:
            return (
                "Nothing has been decided yet: no step was made since the garden began or was "
                "loaded."
            )
        space = self.model.space
        asked = [question.answer for question in self.questions]
        acts = [choice for choice in asked if choice[0] != OP_WAIT] or asked[:1]
        chosen = ", ".join(describe_choice(choice, space) for choice in acts)
        lines = [f"epoch {self.epoch}: {self.policy_name} chose {chosen}."]
        lines += explain(self.policy, self.questions[-1])
        kept = self.choices[len(asked) :]
        if kept and isinstance(self.policy, RulePolicy):
            names = ", ".join(describe_choice(choice, space) for choice in kept)
            lines.append(f"Kept because it was measured, as rules do: {names}.")
        return "\n".join(lines)

    def _noting(self, ask: Ask, look: Callable[[], Sight]) -> Ask:
        """The same, and what was asked and answered is remembered in all processes."""

        def noting(
            masks: Masks, reports: Sequence[Reports], memory: Any, signals: Sequence[Signals]
        ) -> tuple[Actions, Any]:
            actions, after = ask(masks, reports, memory, signals)
            op, slot, blueprint, blend = (int(index) for index in actions[0])
            question = Question(
                masks=masks,
                reports=reports[0],
                memory=memory,
                signals=signals[0],
                # as long as the history: not for rules, which may be asked for thousands of epochs
                sight=look() if isinstance(self.policy, NetworkPolicy) else None,
                answer=(op, slot, blueprint, blend),
            )
            self.questions.append(question)
            return actions, after

        return noting
