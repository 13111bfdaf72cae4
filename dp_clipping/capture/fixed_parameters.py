"""The trainable parameters of a network, which stay what they were when it was made private."""

from itertools import chain
from operator import attrgetter, is_
from typing import Any

from torch import Tensor
from torch.nn import Parameter

from dp_clipping.capture.network import CapturedNetwork
from dp_clipping.torch_compat import every_module, own_modules, own_parameters

IS_TRAINED = attrgetter("requires_grad")


class FixedParameters:
    """The parameters of a captured network: which there are, which are trainable, their dtypes.

    What is clipped and gets noise, and what the optimizer moves, was settled with them.
    """

    def __init__(self, capture: CapturedNetwork):
        self.capture, self.network = capture, capture.network
        # Between forward and backward FSDP has other objects in the place of these.
        self._parameters = dict(self.network.named_parameters())
        self._trainable = {name for name, p in self._parameters.items() if p.requires_grad}
        self._flags = list(map(IS_TRAINED, self._parameters.values()))
        self._dtypes = [(p, p.dtype) for p in capture.parameters]
        self._modules = every_module(self.network)
        self._held = self._hold()

    def check(self) -> None:
        """Raises RuntimeError if trainable parameters are others than when this was made."""
        for parameter, dtype in self._dtypes:
            if parameter.dtype != dtype:
                raise RuntimeError(
                    f"{self.capture.names[parameter]} was {dtype} at make_private and is "
                    f"{parameter.dtype} now: convert the network before make_private"
                )
        flags_hold = list(map(IS_TRAINED, self._parameters.values())) == self._flags
        if flags_hold and self._holds():
            return
        named = dict(self.network.named_parameters())
        changed = {
            name: "trainable" if p.requires_grad else "frozen"
            for name, p in (named | self._parameters).items()
            if p.requires_grad != (name in self._trainable)
        }
        if changed:
            names = ", ".join(f"{name} ({now} now)" for name, now in list(changed.items())[:5])
            raise RuntimeError(
                f"{names}: freeze and unfreeze before make_private; afterwards set the learning "
                "rate of a parameter group to 0, or use to_standard_module() and make it private "
                "again"
            )
        replaced = [
            name for name in sorted(self._trainable)
            if not self._stands_for(named.get(name), self._parameters[name])
        ]  # fmt: skip
        if replaced:
            raise RuntimeError(
                f"{', '.join(replaced[:5])} of the network is another tensor than at make_private "
                "(load_state_dict(assign=True)? a new module?), which the optimizer does not move: "
                "load without assign=True, or change the network before make_private"
            )

    def _hold(self) -> tuple[list[Any], list[Any]]:
        """Returns the sizes and names of modules' parameters and children, and the objects."""
        dicts: list[dict[str, Any]] = [
            *map(own_parameters, self._modules),
            *map(own_modules, self._modules),
        ]
        names = [*map(len, dicts), *chain.from_iterable(dicts)]
        return names, list(chain.from_iterable(map(dict.values, dicts)))

    def _holds(self) -> bool:
        """Returns whether the same modules have the same parameters and children."""
        names, objects = self._hold()
        known_names, known = self._held
        return names == known_names and all(map(is_, objects, known))

    def _stands_for(self, now: Tensor | None, before: Parameter) -> bool:
        """Returns whether a tensor is the parameter, or what FSDP has put in its place."""
        sharding = self.capture.sharding
        return now is before or (sharding is not None and sharding.stands_for(now, before))
