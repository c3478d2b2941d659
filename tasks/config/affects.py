"""What a change of a setting changes. Each setting says it once, and what makes two runs the same follows from it.

===========  ===============================================================================  ======================
mark         what another value changes                                                       a resumed run
===========  ===============================================================================  ======================
Result       the weights, the best model or its test metrics                                  must have it as it was
Course       the same, by how long, how or where a training goes on                           may have another one
Speed        how fast they come, and their last bits                                          may have another one
Bookkeeping  neither: what is written down, kept, named, or done about processes that died    may have another one
===========  ===============================================================================  ======================
"""

from typing import Annotated, Literal, NamedTuple, TypeVar

T = TypeVar("T")
What = Literal["result", "speed", "bookkeeping"]


class Affects(NamedTuple):
    """What a change of a setting changes."""

    what: What
    free_on_resume: bool = True
    """Whether a run that is resumed may have another value than it began with."""


Result = Annotated[T, Affects("result", free_on_resume=False)]
Course = Annotated[T, Affects("result")]
Speed = Annotated[T, Affects("speed")]
Bookkeeping = Annotated[T, Affects("bookkeeping")]
