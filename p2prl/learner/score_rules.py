"""Which layers are known to `score_norms`, and what each tells about its parameters.

In: a layer of a model. Out: its `Rule`, or None when the layer is not known.

Known are layers by what they compute, not by what model they are from: linear maps (torch's, GPT-2's transposed
ones), embeddings (scaled ones too), layer and root-mean-square norms (with weight or 1 + weight), with their biases.
A norm or a scaled embedding is probed once, so that one that computes something else is not mistaken for it.

Invariants: a layer is known only if its own forward is the one the rule describes.
"""

from abc import abstractmethod

import torch
from torch import Tensor, nn
from torch.func import functional_call

from p2prl.learner.adapters import AdaptedLayer
from p2prl.learner.score_layers import ParameterUse
from p2prl.models.lora import is_conv1d

Uses = dict[int, ParameterUse]


class Rule:
    """One layer with trainable parameters. `value` is its input, `back` the gradient of its output, [B, ...]."""

    def __init__(self, layer: nn.Module) -> None:
        self.layer = layer
        self.parameters = trained(layer)

    def per_answer(self, value: Tensor, result: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        """Input and output with a row for each answer."""
        return value, result

    @abstractmethod
    def note(self, uses: Uses, value: Tensor, back: Tensor) -> None:
        """Add this call to the uses of the layer's parameters. Runs without a graph."""

    def _bias(self, uses: Uses, back: Tensor) -> None:
        bias = getattr(self.layer, "bias", None)
        if isinstance(bias, nn.Parameter) and bias.requires_grad:
            _use(uses, bias).add_vector(back.flatten(1, -2).sum(1))


class _Dense(Rule):
    """y = a W^T + b, or a W + b where `transposed`."""

    def __init__(self, layer: nn.Module, transposed: bool) -> None:
        super().__init__(layer)
        self._transposed = transposed
        self._weight = layer.get_parameter("weight")

    def note(self, uses: Uses, value: Tensor, back: Tensor) -> None:
        back = _sequence(back)
        if self._weight.requires_grad:
            use = _use(uses, self._weight)
            use.transposed = self._transposed
            use.inputs.append(_sequence(value))
            use.returned.append(back)
        self._bias(uses, back)


class _Adapted(Rule):
    """y = a W^T + b with W frozen, but for the low-rank A and B of its adapter."""

    def __init__(self, layer: AdaptedLayer) -> None:
        super().__init__(layer)
        self._adapter = layer.adapter

    def note(self, uses: Uses, value: Tensor, back: Tensor) -> None:
        value, back, adapter = _sequence(value), _sequence(back), self._adapter
        down, up = _use(uses, adapter.a), _use(uses, adapter.b)
        down.inputs.append(value)
        down.returned.append(adapter.scale * (back @ adapter.b.to(back.dtype)))
        up.inputs.append(adapter.scale * (value @ adapter.a.to(value.dtype).t()))
        up.returned.append(back)


class _Embedding(Rule):
    """y = scale W[ids]; the row `padding_idx` gets no gradient from here."""

    def __init__(self, layer: nn.Embedding, scale: float) -> None:
        super().__init__(layer)
        self._scale, self._padding, self._weight = scale, layer.padding_idx, layer.get_parameter("weight")

    def per_answer(self, value: Tensor, result: Tensor, rows: int) -> tuple[Tensor, Tensor]:
        if len(value) == 1 < rows and value.ndim == 2:  # positions, looked up once for all answers
            return value.expand(rows, -1), result.expand(rows, -1, -1)
        return value, result

    def note(self, uses: Uses, value: Tensor, back: Tensor) -> None:
        ids, back = value.flatten(1), _sequence(back)
        if self._scale != 1.0:
            back = back * self._scale
        if self._padding is not None:
            back = back * (ids != self._padding)[:, :, None]
        use = _use(uses, self._weight)
        use.ids.append(ids)
        use.row_returned.append(back)


class _Norm(Rule):
    """y = (weight + constant) xhat + b: the weight's gradient is g xhat, and xhat is y at the weight that gives 1."""

    def __init__(self, layer: nn.Module, unit: float) -> None:
        super().__init__(layer)
        self._weight = layer.get_parameter("weight")
        self._plain = {"weight": torch.full_like(self._weight, unit)}
        if isinstance(getattr(layer, "bias", None), nn.Parameter):
            self._plain["bias"] = torch.zeros_like(self._weight)

    def note(self, uses: Uses, value: Tensor, back: Tensor) -> None:
        if self._weight.requires_grad:
            unscaled = functional_call(self.layer, self._plain, (value,))
            _use(uses, self._weight).add_vector((back * unscaled).flatten(1, -2).sum(1))
        self._bias(uses, back)


def trained(layer: nn.Module) -> list[nn.Parameter]:
    """The layer's own parameters that get a gradient; an adapter's are no part of the module."""
    own = [item for item in layer.parameters(recurse=False) if item.requires_grad]
    return [*own, layer.adapter.a, layer.adapter.b] if isinstance(layer, AdaptedLayer) else own


def find_rule(layer: nn.Module) -> Rule | None:
    if isinstance(layer, AdaptedLayer):
        return _Adapted(layer) if len(trained(layer)) == 2 else None
    forward = type(layer).forward
    if forward is nn.Linear.forward:
        return _Dense(layer, transposed=False)
    if isinstance(layer, nn.Embedding):
        plain = not layer.sparse and layer.max_norm is None and not layer.scale_grad_by_freq
        scale = _embedding_scale(layer) if plain else None
        return None if scale is None else _Embedding(layer, scale)
    if is_conv1d(layer):
        return _Dense(layer, transposed=True)
    if forward is nn.LayerNorm.forward or type(layer).__name__.endswith("RMSNorm"):
        unit = _norm_unit(layer)
        return None if unit is None else _Norm(layer, unit)
    return None


@torch.no_grad()
def _embedding_scale(layer: nn.Embedding) -> float | None:
    """What a looked-up row is multiplied by; None when the layer does something else."""
    if type(layer).forward is nn.Embedding.forward:
        return 1.0
    rows = layer.weight[:4].double()
    found = layer(torch.arange(len(rows), device=rows.device)).double()
    size = rows.square().sum()
    if found.shape != rows.shape or size == 0:
        return None
    scale = (found * rows).sum() / size
    return float(scale) if torch.allclose(found, scale * rows, rtol=1e-4, atol=1e-8) else None


@torch.no_grad()
def _norm_unit(layer: nn.Module) -> float | None:
    """The weight at which the layer only normalises: 1, or 0 where it computes with 1 + weight; None: not a norm."""
    own = dict(layer.named_parameters(recurse=False))
    weight = own.get("weight")
    if weight is None or weight.ndim != 1 or not own.keys() <= {"weight", "bias"}:
        return None
    source = torch.Generator().manual_seed(0)
    probe = torch.randn(3, len(weight), generator=source).to(weight)
    other = torch.randn(len(weight), generator=source).to(weight)

    def at(value: Tensor) -> Tensor:
        plain = {"weight": value} | ({"bias": torch.zeros_like(weight)} if "bias" in own else {})
        return functional_call(layer, plain, (probe,))

    zero, one, mixed = at(torch.zeros_like(weight)), at(torch.ones_like(weight)), at(other)
    slope = one - zero
    tolerance = 1e-4 if weight.dtype in (torch.float32, torch.float64) else 5e-2
    if not torch.allclose(mixed, zero + other * slope, rtol=tolerance, atol=tolerance):
        return None
    for unit, value in ((1.0, one), (0.0, zero)):
        if torch.allclose(value, slope, rtol=tolerance, atol=tolerance):
            return unit
    return None


def _sequence(value: Tensor) -> Tensor:
    """[B, ..., d] to [B, T, d]."""
    return value if value.ndim == 3 else value.reshape(len(value), -1, value.shape[-1])


def _use(uses: Uses, parameter: nn.Parameter) -> ParameterUse:
    return uses.setdefault(id(parameter), ParameterUse(parameter))
