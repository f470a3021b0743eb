"""The kinds of models: what train, predict, evaluate and explain do with each.

A further kind is a file here with a `Task`, and a line in `TASKS`.
"""

from .classify import Classify
from .detect import Detect
from .pixels import Generate, Restore
from .task import Task, TrainedModel, test_images

__all__ = ["TASKS", "Task", "TrainedModel", "task_by_loss", "task_of", "test_images"]

TASKS: dict[str, Task] = {
    "classify": Classify(),
    "detect": Detect(),
    "segment": Task(),
    "generate": Generate(),
    "restore": Restore(),
}


def task_of(model: object) -> Task:
    """The task of a model, or of its class; models of other packages classify."""
    return TASKS[getattr(model, "task", "classify")]


def task_by_loss(loss: str) -> Task:
    """The task that a recipe with this loss trains."""
    return next(task for task in TASKS.values() if loss in task.losses)
