"""LoRA on the drafter's layers on CPU, in few products: its layers are small, so calls are what costs.

Stock makes two products for each adapter and each of q, k, v, gate and up. Here the projections that read the
same input share one product, and the adapters of a mixed batch share it too: the slots' matrices lie side by
side in memory, all of them are multiplied at once, and a mask leaves each row its own adapter's part. That
multiplies more than it must, and is still several times faster with eight adapters. Dtypes are stock's, but
for the first product: its float32 is rounded to the layer's dtype right after it in stock, too.

A row's numbers do not depend on other rows' adapters as long as those are finite, which the front door
checks; target adapters, which nobody checks, are left to `grouped_lora`.
"""

from __future__ import annotations

import itertools
from collections import OrderedDict
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

if TYPE_CHECKING:
    import torch

# With more columns than this (slots times rank) multiplying all slots costs more than the calls it saves.
MAX_COLUMNS = 512
_REMEMBERED = 64


class Layer:
    """The slots of one wrapped layer, side by side.

    Args:
        down: [slots, projections, rank, in].
        up: for each projection [out, slots, rank].

    Attributes:
        all_down: [slots * projections * rank, in], a view.
        all_up: for each projection its columns of the output, and [slots * rank, out], a view.
        one: for each slot the same of it alone: [projections * rank, in], and for each projection columns of
            the output, columns of the first product, and [rank, out].
        shape: (slots, projections, rank).
    """

    def __init__(self, down: torch.Tensor, up: tuple[torch.Tensor, ...]) -> None:
        self.down, self.up = down, up
        slots, projections, rank = self.shape = down.shape[:3]
        ends = np.cumsum([0, *(len(part) for part in up)]).tolist()
        columns = [slice(*pair) for pair in itertools.pairwise(ends)]
        hidden = [slice(i * rank, (i + 1) * rank) for i in range(projections)]
        # Made once: a view costs as much as a good part of these products.
        self.all_down = down.flatten(0, 2)
        self.all_up = [(c, part.flatten(1).t()) for c, part in zip(columns, up, strict=True)]
        self.one = [
            (
                down[slot].flatten(0, 1),
                [(c, h, part[:, slot].t()) for c, h, part in zip(columns, hidden, up, strict=True)],
            )
            for slot in range(slots)
        ]


def lay_out(module: Any) -> Layer:
    """Move a wrapped layer's slots into two buffers; what vLLM writes to and reads from become views of them.

    Args:
        module: a `BaseLinearLayerWithLoRA`: `lora_a_stacked` of [slots, 1, rank, in] and `lora_b_stacked`
            of [slots, 1, out, rank], for each projection.
    """
    import torch

    down = torch.stack([a.squeeze(1) for a in module.lora_a_stacked], dim=1)
    up = tuple(b.squeeze(1).transpose(0, 1).contiguous() for b in module.lora_b_stacked)
    module.lora_a_stacked = tuple(down[:, i].unsqueeze(1) for i in range(down.shape[1]))
    module.lora_b_stacked = tuple(b.transpose(0, 1).unsqueeze(1) for b in up)
    return Layer(down, up)


@dataclass(frozen=True)
class Rows:
    """Whose the rows of a forward are: a mask for all slots at once, or groups for one slot after the other.

    Attributes:
        count: of rows.
        mask: bool [rows, slots], or None.
        groups: slots and their rows, without a mask.
    """

    count: int
    mask: torch.Tensor | None = None
    groups: tuple[tuple[int, slice | torch.Tensor], ...] = ()


def sort_rows(slots: np.ndarray, count: int, rank: int) -> Rows:
    """Rows of a forward.

    Args:
        slots: int64 [rows], -1 for the base drafter.
        count: how many slots there are.
        rank: rank of a slot.
    """
    import torch

    groups: list[tuple[int, slice | torch.Tensor]] = []
    for slot in np.unique(slots[slots >= 0]).tolist():
        rows = np.flatnonzero(slots == slot)
        first, last = int(rows[0]), int(rows[-1])
        together = last - first + 1 == len(rows)
        groups.append((slot, slice(first, last + 1) if together else torch.from_numpy(rows)))
    if len(groups) > 1 and count * rank <= MAX_COLUMNS:
        return Rows(len(slots), mask=torch.from_numpy(slots[:, None] == np.arange(count)))
    return Rows(len(slots), groups=tuple(groups))


def add(y: torch.Tensor, x: torch.Tensor, layer: Layer, rows: Rows) -> None:
    """Add every row's adapter to a layer's output.

    Args:
        y: [rows, all outs], changed in place.
        x: [rows, in].

    Raises:
        ValueError: `rows` are those of another forward.
    """
    from torch.nn.functional import linear

    if rows.mask is None and not rows.groups:
        return  # of however many rows: a dummy run maps more than it runs
    if len(x) != rows.count:
        raise ValueError(f"drafter adapters of {rows.count} rows for {len(x)} rows")
    if rows.mask is not None:
        hidden = linear(x, layer.all_down).unflatten(1, layer.shape) * rows.mask[:, :, None, None]
        for i, (columns, up) in enumerate(layer.all_up):
            y[:, columns].addmm_(hidden[:, :, i].flatten(1), up)
    for slot, own in rows.groups:
        down, ups = layer.one[slot]
        whole = isinstance(own, slice) and own.stop - own.start == rows.count
        hidden = linear(x if whole else x[own], down)
        for columns, part, up in ups:
            if whole:
                y[:, columns].addmm_(hidden[:, part], up)
            elif isinstance(own, slice):
                y[own, columns].addmm_(hidden[:, part], up)
            else:
                y[:, columns].index_add_(0, own, hidden[:, part] @ up)


def use(manager: Any) -> None:
    """Let the layers of a `LoRAModelManager` be served from here; it must not have loaded an adapter yet."""
    from vllm.lora.model_manager import DEFAULT_LANGUAGE_WRAPPER_KEY
    from vllm.lora.punica_wrapper.punica_cpu import PunicaWrapperCPU

    config = manager.lora_config
    layers: dict[int, Layer] = {}
    for module in manager.modules.values():
        layer = lay_out(module)
        layers[id(module.lora_a_stacked)] = layer  # the tuple that vLLM hands over with every forward

    class DrafterWrapper(PunicaWrapperCPU):
        """Keeps no metadata but whose the rows are: nothing but linear layers is wrapped."""

        def __init__(self) -> None:
            self._rows = Rows(0)
            self._remembered: OrderedDict[Any, Rows] = OrderedDict()

        def update_metadata(
            self, mapping: Any, lora_index_to_id: list[int | None], *args: Any, **kwargs: Any
        ) -> None:
            key = (mapping.index_mapping, tuple(lora_index_to_id))
            if key not in self._remembered:
                slot_of = {id_: slot for slot, id_ in enumerate(lora_index_to_id) if id_ is not None}
                slots = np.array([slot_of[id_] if id_ else -1 for id_ in mapping.index_mapping])
                self._remembered[key] = sort_rows(slots, config.max_loras, config.max_lora_rank)
                if len(self._remembered) > _REMEMBERED:
                    self._remembered.popitem(last=False)
            self._rows = self._remembered[key]

        def add_lora_linear(self, y: Any, x: Any, lora_a_stacked: Any, *args: Any, **kwargs: Any) -> None:
            add(y, x, layers[id(lora_a_stacked)], self._rows)

        def shorten(self, module: Any) -> None:
            """Spare a layer the look-ups on the way here, which cost it as much as a product of one row."""
            stock, base, layer = module._apply_sync, module.base_layer, layers[id(module.lora_a_stacked)]
            multiply = module._get_quant_method().apply

            def _apply_sync(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
                if x.dim() != 2:  # stock flattens batches of sequences first
                    return stock(x, bias)
                output = multiply(base, x, bias)
                add(output, x, layer, self._rows)
                return output

            module._apply_sync = _apply_sync

    wrapper = DrafterWrapper()
    manager.punica_wrapper_mapping[DEFAULT_LANGUAGE_WRAPPER_KEY] = wrapper
    for module in manager.modules.values():
        module.set_mapping(wrapper)
        wrapper.shorten(module)
