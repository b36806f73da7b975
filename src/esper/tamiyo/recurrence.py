"""An LSTM over rows in which lives begin and end. Each piece of a life runs as a sequence of its own, all at once."""

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pack_padded_sequence, pad_packed_sequence

Hidden = tuple[Tensor, Tensor]
"""h and c, each [1, N, H]"""


def run_sequences(lstm: nn.LSTM, inputs: Tensor, hidden: Hidden, starts: Tensor | None) -> tuple[Tensor, Hidden]:
    """Outputs [N, T, H] and the state after the last step. The state is zero wherever `starts` [N, T] is true."""
    if starts is None or not bool(starts.any()):
        return lstm(inputs, hidden)
    count, steps = starts.shape
    begins = starts.clone()
    begins[:, 0] = True
    piece = begins.flatten().cumsum(0) - 1  # which piece each step belongs to
    first = begins.flatten().nonzero().squeeze(1)
    ends = torch.cat([first[1:], first.new_tensor([count * steps])])
    lengths = ends - first
    within = torch.arange(count * steps, device=starts.device) - first[piece]
    padded = inputs.new_zeros(len(first), int(lengths.max()), inputs.shape[-1])
    padded = padded.index_put((piece, within), inputs.flatten(0, 1))
    keeps = (first % steps == 0) & ~starts.flatten()[first]  # only a piece that goes on from before has a past
    past = tuple(
        torch.where(keeps[None, :, None], state[:, first // steps], torch.zeros_like(state[:, :1])) for state in hidden
    )
    packed = pack_padded_sequence(padded, lengths.cpu(), batch_first=True, enforce_sorted=False)
    out, after = lstm(packed, (past[0].contiguous(), past[1].contiguous()))
    outputs = pad_packed_sequence(out, batch_first=True)[0][piece, within].view(count, steps, -1)
    last = piece.view(count, steps)[:, -1]
    return outputs, (after[0][:, last], after[1][:, last])
