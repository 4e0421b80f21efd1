"""JSON schemas of Python functions that a model may call."""

import inspect
from collections.abc import Callable
from typing import Any

from cohort.errors import UserError

_ADVICE = "Tools need type hints and a Google-style docstring that describes the tool and, under Args:, each parameter"


def tool_schema(function: Callable[..., Any]) -> dict[str, Any]:
    """Return the JSON schema of a typed function or method with a Google-style docstring.

    Raises:
        UserError: the docstring, a type hint or the description of a parameter is missing, or a type has no schema.
    """
    from transformers.utils.chat_template_utils import (
        DocstringParsingException,
        TypeHintParsingException,
        get_json_schema,
        parse_google_format_docstring,
    )

    name = getattr(function, "__name__", type(function).__name__)
    where = f"tool {name!r}"
    try:
        signature = inspect.signature(function)
    except (TypeError, ValueError) as error:
        raise UserError(f"{where}: is not a Python function: {error}. {_ADVICE}") from error
    documentation = inspect.getdoc(function)
    if not documentation:
        raise UserError(f"{where}: has no docstring. {_ADVICE}")
    _, described, _ = parse_google_format_docstring(documentation.strip())
    for parameter in signature.parameters.values():
        if parameter.kind in (parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY):
            raise UserError(f"{where}: parameter {str(parameter)!r} cannot be passed by name. {_ADVICE}")
        if parameter.annotation is parameter.empty:
            raise UserError(f"{where}: parameter {parameter.name!r} has no type hint. {_ADVICE}")
        if parameter.name not in (described or {}):
            raise UserError(f"{where}: the docstring does not describe parameter {parameter.name!r}. {_ADVICE}")
    try:
        schema: dict[str, Any] = get_json_schema(function)
    except (DocstringParsingException, TypeHintParsingException, ValueError, TypeError, NameError) as error:
        raise UserError(f"{where}: {error}. {_ADVICE}") from error
    return schema
