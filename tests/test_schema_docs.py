"""The published schemas are current, whole, and say what the code does."""

import json
from pathlib import Path
from typing import Any

import msgspec
import pytest
import typer
from typer.testing import CliRunner

from kvbus import __version__
from kvbus.cli import schema
from kvbus_schemas import KINDS, MESSAGE_BYTES_MAX, EngineCard, LoadReported, Message, docs, subjects

jsonschema = pytest.importorskip("jsonschema")

SCHEMAS = Path(__file__).parent.parent / "schemas"
GOLDEN = SCHEMAS / "golden"


def golden(kind: type[Message]) -> Message:
    """The fully filled golden message of that kind."""
    return msgspec.msgpack.decode((GOLDEN / f"{kind.__name__}.2.bin").read_bytes(), type=kind)


@pytest.mark.parametrize("form", ["json", "asyncapi"])
def test_the_checked_in_documents_are_current(form: str) -> None:
    name = "schema" if form == "json" else "asyncapi"
    assert (SCHEMAS / f"kvbus.{name}.json").read_text() == schema.document(schema.Form(form)), "run: kvbus schema"


def test_the_json_schema_is_a_json_schema() -> None:
    jsonschema.Draft202012Validator.check_schema(docs.json_schema())


def test_every_field_with_a_docstring_is_described() -> None:
    assert docs.field_docs(LoadReported)["tokens_in_flight"].startswith("Prompt and output tokens")
    assert docs.field_docs(LoadReported)["seq"].startswith("Counts the sender's messages")
    properties = docs.json_schema()["$defs"]["LoadReported"]["properties"]
    assert properties["tokens_in_flight"]["description"].startswith("Prompt and output tokens")


def _references(node: Any) -> set[str]:
    if isinstance(node, dict):
        here = {node["$ref"]} if isinstance(node.get("$ref"), str) else set()
        return here.union(*map(_references, node.values()))
    return set().union(*map(_references, node)) if isinstance(node, list) else set()


def _resolve(document: Any, reference: str) -> Any:
    for step in reference.removeprefix("#/").split("/"):
        document = document[step]
    return document


def test_every_reference_of_the_asyncapi_document_leads_somewhere() -> None:
    document = docs.asyncapi(__version__)
    assert [r for r in _references(document) if not _resolve(document, r)] == []


def test_the_asyncapi_document_has_a_channel_an_address_and_both_sides_for_every_kind() -> None:
    document = docs.asyncapi(__version__)
    assert document["asyncapi"] == "3.0.0"
    assert list(document["channels"]) == [*(kind.__name__ for kind in KINDS), "DeadLetter"]
    for name, channel in document["channels"].items():
        assert set(channel["parameters"]) == {p for p in docs.PARAMETERS if f"{{{p}}}" in channel["address"]}
        sides = [o for o in document["operations"].values() if o["channel"]["$ref"] == f"#/channels/{name}"]
        assert {side["action"] for side in sides} == {"send", "receive"}
        assert all(side["messages"] == [{"$ref": f"#/channels/{name}/messages/{name}"}] for side in sides)


@pytest.mark.parametrize("kind", [k for k in KINDS if k is not EngineCard], ids=lambda kind: kind.__name__)
def test_the_published_address_is_the_subject(kind: type[Message]) -> None:
    message = golden(kind)
    address = docs.asyncapi(__version__)["channels"][kind.__name__]["address"]
    filled = address.format(sender="me", to="you", key=message.key)
    assert filled == subjects.subject_of(message, sender="me", to="you")


def test_the_published_limits_are_those_of_the_code() -> None:
    facts = docs.asyncapi(__version__)["x-kvbus"]
    assert facts["token"] == subjects._TOKEN.pattern
    assert facts["message_bytes_max"] == MESSAGE_BYTES_MAX


def test_kvbus_schema_writes_the_document(tmp_path: Path) -> None:
    app = typer.Typer()
    schema.register(app)
    printed = CliRunner().invoke(app, ["json"])
    assert json.loads(printed.output)["title"] == "kvbus messages"
    assert CliRunner().invoke(app, ["asyncapi", "--out", str(tmp_path / "a.json")]).exit_code == 0
    assert json.loads((tmp_path / "a.json").read_text())["info"]["version"] == __version__
    assert CliRunner().invoke(app, ["yaml"]).exit_code == 2


@pytest.mark.parametrize("path", sorted(GOLDEN.glob("*.json")), ids=lambda path: path.stem)
def test_golden_messages_fit_the_published_schema(path: Path) -> None:
    document = {"$defs": docs.json_schema()["$defs"], "$ref": f"#/$defs/{path.name.split('.')[0]}"}
    jsonschema.Draft202012Validator(document).validate(json.loads(path.read_bytes()))
