"""The `json_schema` reward: 1.0 if the completion is valid JSON under a schema. Needs the package jsonschema."""

import json
import re
from collections.abc import Iterator, Mapping, Sequence
from functools import cache
from typing import Any

from cohort.config.rewards import JsonSchemaSettings
from cohort.errors import UserError, excerpt
from cohort.rewards.builtin import BuiltinReward, Columns
from cohort.rewards.completion_text import after_thinking, answer_text
from cohort.rewards.function import require_package

_FENCED = re.compile(r"```(?i:json)?[^\S\n]*+\n(.*?)```", re.DOTALL)
_MAX_CHARS = 200_000  # of JSON: half a second for 100,000 numbers


class JsonSchemaReward(BuiltinReward[JsonSchemaSettings]):
    """1.0 for valid JSON, else 0.0; None if the row has no schema.

    The JSON is the last fenced block (three backticks, alone or with `json`), else the whole text, behind the last
    `</think>`. NaN and infinities are not JSON, and more than 200,000 characters are not read. References to other
    documents are not resolved.
    """

    per_group = True

    def required_columns(self) -> Sequence[str]:
        """See `BuiltinReward`."""
        return () if self.settings.schema_column is None else (self.settings.schema_column,)

    def check(self) -> None:
        """See `BuiltinReward`."""
        require_package("jsonschema", extra="json-schema")
        if self.settings.schema_ is not None:
            _validator(json.dumps(self.settings.schema_))

    def __call__(self, completions: Sequence[Any], columns: Columns) -> list[float | None]:
        """Return one reward per completion.

        Raises:
            UserError: a value of the schema column is not a schema.
        """
        column = self.settings.schema_column
        given: Sequence[Any] = [self.settings.schema_] * len(completions) if column is None else columns[column]
        schemas = [value if value is None or isinstance(value, str) else json.dumps(value) for value in given]
        rewards: list[float | None] = []
        for completion, text in zip(completions, schemas, strict=True):
            try:
                validator = None if text is None else _validator(text)
            except ValueError as error:
                raise UserError(f"the column {column!r} holds {excerpt(text)}: {error}") from error
            rewards.append(None if validator is None else float(_is_valid(validator, answer_text(completion))))
        return rewards


def _is_valid(validator: Any, text: str) -> bool:
    answer = after_thinking(text)
    text = (_FENCED.findall(answer) or [answer])[-1].strip()
    if len(text) > _MAX_CHARS:
        return False
    try:
        value = json.loads(text, parse_constant=_refuse)
        return bool(validator.is_valid(value))
    except (ValueError, RecursionError):  # also of nesting that is too deep to read or to validate
        return False


def _refuse(constant: str) -> None:
    raise ValueError(f"{constant} is not JSON")


@cache
def _validator(schema_text: str) -> Any:
    """Return a validator of the schema; nothing is fetched from the network.

    Raises:
        ValueError: it is not a JSON schema, or refers to something that is not in it.
    """
    import jsonschema
    from jsonschema_specifications import REGISTRY
    from referencing.jsonschema import DRAFT202012, specification_with

    try:
        schema = json.loads(schema_text)
    except ValueError as error:
        raise ValueError(f"not JSON: {error}") from error
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    try:
        kind.check_schema(schema)
    except jsonschema.SchemaError as error:
        raise ValueError(f"schema is not a JSON schema: {error.message} (at {error.json_path})") from error
    resource = specification_with(str(kind.META_SCHEMA["$schema"]), DRAFT202012).create_resource(schema)
    _check_references(REGISTRY.resolver_with_root(resource), resource)
    # A registry of the meta-schemas alone: by default jsonschema would download what a schema refers to.
    validator = jsonschema.validators.extend(kind, {"uniqueItems": _unique_items})(schema, registry=REGISTRY)
    try:
        validator.is_valid(None)
    except RecursionError:
        raise ValueError("schema refers to itself without end") from None
    return validator


def _unique_items(validator: Any, is_required: bool, items: Any, schema: Any) -> Iterator[Exception]:
    """Check `uniqueItems` in linear time: jsonschema compares each item with each."""
    import jsonschema

    if is_required and validator.is_type(items, "array"):
        texts = {json.dumps(_whole_as_int(item), sort_keys=True) for item in items}
        if len(texts) < len(items):
            yield jsonschema.ValidationError("the items are not unique")


def _whole_as_int(value: Any) -> Any:
    """Return a JSON value with 1 for 1.0, which are equal."""
    if isinstance(value, list):
        return [_whole_as_int(item) for item in value]
    if isinstance(value, dict):
        return {key: _whole_as_int(item) for key, item in value.items()}
    return int(value) if isinstance(value, float) and value.is_integer() else value


def _check_references(resolver: Any, resource: Any) -> None:
    """Check that all references of a schema and of the schemas in it can be resolved.

    Raises:
        ValueError: one cannot.
    """
    import referencing.exceptions

    for key in ("$ref", "$dynamicRef", "$recursiveRef"):
        reference = resource.contents.get(key) if isinstance(resource.contents, Mapping) else None
        if not isinstance(reference, str):
            continue
        try:
            resolver.lookup(reference)
        except (referencing.exceptions.Unresolvable, ValueError) as error:
            other = "" if reference.startswith("#") else " Other documents are not fetched: copy it to $defs."
            raise ValueError(f"schema: {key} {reference!r} leads to nothing in the schema.{other}") from error
    for inner in resource.subresources():
        _check_references(resolver.in_subresource(inner), inner)
