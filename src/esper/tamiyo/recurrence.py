"""An LSTM over rows in which episodes begin anywhere; no policy, no growth.

Shapes: N rows of T steps, H wide.
"""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence

Hidden = tuple[Tensor, Tensor]
"""h and c, each [1, N, H]."""


def run_sequences(
    lstm: nn.LSTM,
    inputs: Tensor,
    hidden: Hidden,
    starts: Tensor | None,
    *,
    needs_state: bool = True,
) -> tuple[Tensor, Hidden]:
    """Outputs [N, T, H] and the state after the last step.

    The state is zero wherever `starts` [N, T] is true. Where episodes begin within rows, the state
    after the last step carries no gradient; finding it costs a pass, which `needs_state=False`
    spares: it is NaN then.
    """
    if starts is None or not bool(starts.any()):
        return lstm(inputs, hidden)
    count, steps = starts.shape
    # a piece is a part of a row without a beginning inside
    begins = starts.clone()
    begins[:, 0] = True
    piece = begins.flatten().cumsum(0) - 1  # which piece each step belongs to
    first = begins.flatten().nonzero().squeeze(1)  # the first step of each piece
    lengths = torch.cat([first[1:], first.new_tensor([count * steps])]) - first
    within = torch.arange(count * steps, device=starts.device) - first[piece]
    padded = inputs.new_zeros(len(first), int(lengths.max()), inputs.shape[-1])
    padded = padded.index_put((piece, within), inputs.flatten(0, 1))
    # only a piece that continues from before has a past
    keeps = ((first % steps == 0) & ~starts.flatten()[first])[None, :, None]
    past = tuple(torch.where(keeps, state[:, first // steps], 0.0).contiguous() for state in hidden)
    # padded, not packed: going back through a packed sequence costs the square of its length on a
    # CPU
    outputs = lstm(padded, past)[0][piece, within].view(count, steps, -1)
    if not needs_state:
        unknown_h = torch.full_like(hidden[0], torch.nan)
        unknown_c = torch.full_like(hidden[1], torch.nan)
        return outputs, (unknown_h, unknown_c)
    last = piece.view(count, steps)[:, -1]
    with torch.no_grad():
        packed = pack_padded_sequence(
            padded[last], lengths[last].cpu(), batch_first=True, enforce_sorted=False
        )
        after = lstm(packed, (past[0][:, last], past[1][:, last]))[1]
    return outputs, after
