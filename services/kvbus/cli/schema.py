"""`kvbus schema`: the bus as JSON Schema or AsyncAPI, and the router as OpenAPI, for programs not written in Python."""

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from kvbus import __version__
from kvbus_schemas import docs


class Form(StrEnum):
    """Which document."""

    JSON = "json"
    ASYNCAPI = "asyncapi"
    OPENAPI = "openapi"
    SETTINGS = "settings"
    METRICS = "metrics"


def document(form: Form) -> str:
    """The document as it is checked in under schemas/; the settings as they stand in the README."""
    if form is Form.SETTINGS:
        from kvbus.settings_table import markdown

        return markdown()
    if form is Form.METRICS:
        from kvbus.metrics import catalogue

        return catalogue.markdown()
    if form is Form.OPENAPI:
        from kvbus.router.openapi import openapi

        return docs.text_of(openapi(__version__))
    return docs.text_of(docs.json_schema() if form is Form.JSON else docs.asyncapi(__version__))


def schema(
    form: Annotated[
        Form,
        typer.Argument(
            help="json: JSON Schema of every message; asyncapi: the whole bus; openapi: what a router serves; "
            "settings, metrics: "
            "every setting, every metric, Markdown"
        ),
    ] = Form.JSON,
    out: Annotated[Path | None, typer.Option(help="Write to this file instead of standard output.")] = None,
) -> None:
    """Print the JSON Schema or the AsyncAPI document of the bus, or the OpenAPI document of the router."""
    if out is None:
        print(document(form), end="")
    else:
        out.write_text(document(form), encoding="utf-8")


def register(app: typer.Typer) -> None:
    """Add `kvbus schema`."""
    app.command("schema")(schema)
