"""Networks that a process without Esper can import: torch alone."""

import torch
from torch import nn


class Images(nn.Module):
    """One module that is an `nn.Sequential`, and one that is not."""

    def __init__(self):
        super().__init__()
        self.enter = nn.Sequential(nn.Conv2d(1, 8, 3, padding=1), nn.BatchNorm2d(8), nn.ReLU())
        self.middle = nn.Conv2d(8, 8, 3, padding=1)
        self.leave = nn.Linear(8, 3)

    def forward(self, images):
        return self.leave(self.middle(self.enter(images)).mean((2, 3)))


class Tokens(nn.Module):
    """A stack of transformer layers."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.leave = nn.Linear(8, 3)

    def forward(self, tokens):
        return self.leave(self.encoder(tokens))


class Layer(nn.Module):
    """A layer that is called with more than its features, and may write to a cache."""

    def __init__(self):
        super().__init__()
        self.mix = nn.Linear(8, 8)

    def forward(self, features, mask=None, past_key_values=None, use_cache=True):
        if past_key_values is not None:
            past_key_values.append(features)
        self.last = features if use_cache else None
        return features + torch.tanh(self.mix(features)) * mask


class DenseLayer(nn.Module):
    """A layer that is called with a list."""

    def __init__(self, count):
        super().__init__()
        self.mix = nn.Linear(8 * count, 8)

    def forward(self, features):
        return self.mix(torch.cat(features, -1))


class DenseBlock(nn.ModuleDict):
    """A dict that calls all its members, as in a densely connected network."""

    def forward(self, features):
        kept = [features]
        for layer in self.values():
            kept.append(layer(kept))
        return torch.cat(kept, -1)


class Dense(nn.Module):
    """Such a dict between two layers."""

    def __init__(self):
        super().__init__()
        self.block = DenseBlock({"first": DenseLayer(1), "second": DenseLayer(2)})
        self.leave = nn.Linear(24, 3)

    def forward(self, tokens):
        return self.leave(self.block(tokens))


class Open(nn.Module):
    """A layer that does not name all that it gets."""

    def __init__(self):
        super().__init__()
        self.inner = Layer()

    def forward(self, features, **others):
        return self.inner(features, **others)


class Cache(list):
    """What layers have seen."""

    def get_seq_length(self):
        return self[-1].shape[1] if self else 0


class Config:
    """What a model says about itself."""

    use_cache = True


class Decoder(nn.Module):
    """Layers with a skip from the middle of their list, so that no copy can join them."""

    def __init__(self):
        super().__init__()
        self.config = Config()
        self.layers = nn.ModuleList(Layer() for _ in range(3))
        self.leave = nn.Linear(8, 3)

    def forward(self, features, use_cache=None):
        caches = self.config.use_cache if use_cache is None else use_cache
        past = Cache() if caches else None
        mask = torch.ones_like(features)
        for number, layer in enumerate(self.layers):
            features = layer(features, mask, past_key_values=past, use_cache=caches)
            if number == len(self.layers) // 2:
                features = 2 * features
        return self.leave(features)
