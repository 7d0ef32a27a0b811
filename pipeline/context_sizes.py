"""How many texts of what length; apart from pipeline/texts.py, so that stages that read texts depend on none of it."""

from __future__ import annotations

from pipeline.study import Contexts, Params
from specdec.errors import InputError


def contexts_spec(params: Params, name: str) -> Contexts:
    """What params.yaml says of the contexts of that name.

    Raises:
        InputError: nothing.
    """
    if name not in params.contexts:
        raise InputError(f"The contexts {name!r} are not in params.yaml; allowed: {', '.join(params.contexts)}.")
    return params.contexts[name]
