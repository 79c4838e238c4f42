"""Optimizers that become part of the graph, and learning-rate schedules."""

from ortgraph.errors import InputError
from ortgraph.optim import schedules
from ortgraph.optim.adamw import AdamW
from ortgraph.optim.base import Group, Optimizer, name_of
from ortgraph.optim.lamb import LAMB
from ortgraph.optim.loss_scale import LossScale
from ortgraph.optim.sgd import SGD

BY_TEXT: dict[str, type[Optimizer]] = {cls.TEXT: cls for cls in (AdamW, LAMB, SGD)}


def parse(text: str) -> Optimizer:
    """The optimizer that a text form stands for: ``adamw(lr=0.01)``, ``lamb``, ``sgd(momentum=0.9)``.

    Raises:
        InputError: The text does not parse, or the optimizer is unknown.
    """
    cls = BY_TEXT.get(name_of(text))
    if cls is None:
        raise InputError(f"optimizer {text!r} does not parse", f"one of {', '.join(BY_TEXT)}, as adamw(lr=0.001)")
    return cls.parse(text)


__all__ = ["LAMB", "SGD", "AdamW", "Group", "LossScale", "Optimizer", "parse", "schedules"]
