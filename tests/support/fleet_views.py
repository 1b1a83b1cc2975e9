"""The view of a document and its text."""

from __future__ import annotations

from importlib import import_module
from typing import Any

from healthd.common.page import Page


def view_of(document: dict[str, Any]) -> Any:
    return import_module(f"healthd.fleet.views.{document['answer']}").view(document)


def text_of(document: dict[str, Any], page: Page) -> str:
    from healthd.fleet.view import view_text

    return view_text(view_of(document), page)
