"""Networks, masks and decisions that the tests of the policy network share."""

import torch

from esper.leyline.factored_actions import NUM_BLENDS, NUM_BLUEPRINTS, NUM_OPS, OP_WAIT
from esper.tamiyo.network import FactoredRecurrentActorCritic

STATE_DIM = 11
HEADS = ("op", "slot", "blueprint", "blend")


def build(slots=3, *, seed=0, sharpness=1.0, hidden_dim=32, head_dim=16, **sizes):
    """A small growth policy; `sharpness` multiplies its logits, which are close to even in a fresh
    one.
    """
    torch.manual_seed(seed)
    net = FactoredRecurrentActorCritic(
        STATE_DIM, slots, hidden_dim=hidden_dim, head_dim=head_dim, **sizes
    )
    return sharpen(net, sharpness)


@torch.no_grad()
def sharpen(net, factor):
    for layer in ends_of(net.policy_heads):
        layer.weight.mul_(factor)
    return net


def ends_of(heads):
    """The last layers of heads, which make the logits."""
    return [
        layer
        for head in heads.values()
        for layer in (head.ends if hasattr(head, "ends") else [head[-1]])
    ]


def end_of(head):
    """The name of the weights that make a head's logits."""
    return f"policy_heads.{head}.{'2' if head == 'op' else 'last'}.weight"


def some_of(*shape, share=0.55):
    """A random mask in which every row has at least one true entry."""
    mask = torch.rand(shape) < share
    lonely = torch.nn.functional.one_hot(torch.randint(shape[-1], shape[:-1]), shape[-1]).bool()
    return torch.where(mask.any(-1, keepdim=True), mask, lonely)


def joint_masks(*shape, slots=3, blueprints=NUM_BLUEPRINTS, blends=NUM_BLENDS):
    """Random masks as a population gives them:

    slot by op, blueprint by slot; WAIT is possible and needs no slot.
    """
    op, slot = some_of(*shape, NUM_OPS), some_of(*shape, NUM_OPS, slots)
    op[..., OP_WAIT] = True
    slot[..., OP_WAIT, :] = torch.arange(slots) == 0
    return {
        "op": op,
        "slot": slot,
        "blueprint": some_of(*shape, slots, blueprints),
        "blend": some_of(*shape, blends),
    }


def plain_masks(*shape, slots=3):
    """Random masks of which none depends on an earlier choice."""
    sizes = {"op": NUM_OPS, "slot": slots, "blueprint": NUM_BLUEPRINTS, "blend": NUM_BLENDS}
    return {head: some_of(*shape, size) for head, size in sizes.items()}


def as_arguments(masks):
    return {f"{head}_mask": mask for head, mask in masks.items()}


def at(step, masks):
    return {head: mask[:, step] for head, mask in masks.items()}


@torch.no_grad()
def live(net, states, masks, starts=None, hidden=None, generator=None):
    """Decide step by step, as a rollout does:

    choices, log-probabilities and values [N, T], and the last state.
    """
    count, steps = states.shape[:2]
    hidden = net.get_initial_hidden(count) if hidden is None else hidden
    seen = []
    for step in range(steps):
        if starts is not None:
            hidden = tuple(torch.where(starts[None, :, step, None], 0.0, part) for part in hidden)
        *decision, hidden = net.get_action(
            states[:, step], hidden, at(step, masks), generator=generator
        )
        seen.append(decision)
    choices, log_probs, values = zip(*seen, strict=True)
    names = net.spec.names
    return (
        {name: torch.stack([each[name] for each in choices], 1) for name in names},
        {name: torch.stack([each[name] for each in log_probs], 1) for name in names},
        torch.stack(values, 1),
        hidden,
    )


def ratios(new, old):
    """How far each head's ratio, and that of the whole decision, is from 1 at most."""
    logs = {name: new[name].detach() - old[name] for name in old}
    logs["joint"] = torch.stack(list(logs.values())).sum(0)
    return {name: float((log.exp() - 1).abs().max()) for name, log in logs.items()}


def gradients(net):
    return {name: None if p.grad is None else p.grad.clone() for name, p in net.named_parameters()}
