"""Runs any other module, each sample with a copy of the parameters.

The copies are one tensor expanded to [B, *parameter], which takes no memory; its gradient under
ordinary autograd is G. Nothing is derived by hand, so this is right for every module that treats
samples apart, and costs what G costs. Modules that own a bare parameter come here. The first batch
decides (`capture.vmap_trial`) which of these ways a module runs in:

    on the whole batch              its own operators know the copies (`whole_batch`)
    under `torch.vmap`              together with its child layers
    one sample after another        likewise, where `torch.vmap` cannot run it
"""

from typing import Any

from dp_clipping.layers.handle import LayerState, plain_forward
from dp_clipping.layers.vmap.own import UnknownOperation
from dp_clipping.layers.vmap.samples import every_sample
from dp_clipping.layers.vmap.whole_batch import Call, on_whole_batch


def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
    handle: LayerState = self._private
    if handle.private_step is None:
        return plain_forward(self, *args, **kwargs)
    slots: dict[str, Any] = {name: handle.slot(name) for name in handle.trainable}
    if handle.operations is None:
        return every_sample(self, slots, handle.private_step.batch_size, args, kwargs)
    if handle.flattened:  # operators do not see how often the module is called
        handle.layouts_of(handle.tensors((args, kwargs)), handle.rows, of_units=False)
    if (k := handle.examples_per_unit) > 1:
        slots = {
            name: x[:, None].expand(-1, k, *x.shape[1:]).flatten(0, 1) for name, x in slots.items()
        }
    call = Call(handle.title(self), handle.rows, handle.operations)
    try:
        return on_whole_batch(self, call, slots, args, kwargs)
    except UnknownOperation as error:
        raise handle.unseen(error) from error
