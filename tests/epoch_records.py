"""Epochs of hosts as events, for tests that make up runs."""

from esper.telemetry.events import HostEpoch


def grown_epoch(host, epoch, train_loss, held_out_loss, accuracy, params, flops):
    """As a run under a policy tells it."""
    return HostEpoch(
        host,
        epoch,
        held_out_loss,
        params,
        train_loss=train_loss,
        held_out_accuracy=accuracy,
        flops=flops,
    )


def taught_epoch(
    round_, host, epoch, train_loss, held_out_loss, accuracy, twin, params, flops, reward, parts
):
    """As the training of a policy tells it."""
    return HostEpoch(
        host,
        epoch,
        held_out_loss,
        params,
        train_loss=train_loss,
        held_out_accuracy=accuracy,
        flops=flops,
        round=round_,
        twin_accuracy=twin,
        reward=reward,
        reward_parts=parts,
    )
