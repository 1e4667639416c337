#!/usr/bin/env python3
"""Chat templates of examples/generate against jinja2: the templates of llama.cpp's sources with a set of conversations.

    test_chat_templates.py                   fetches the sources, and runs the test of examples/generate that compares
    test_chat_templates.py --render FOLDER   what that test runs: renders a folder of templates with jinja2

--render prints a line of JSON for each template and conversation: the variables, and the text or the error. jinja2 is set up as by
transformers' apply_chat_template.
"""
import argparse
import datetime
import json
import sys
from pathlib import Path

import jinja2.ext
from jinja2 import nodes
from jinja2.exceptions import TemplateError
from jinja2.sandbox import ImmutableSandboxedEnvironment

NOW = datetime.datetime(2026, 3, 7, 9, 5, 8)  # the test has the same time


class GenerationTag(jinja2.ext.Extension):
    """{% generation %}, which marks the model's text for training, has no effect on it."""

    tags = {"generation"}

    def parse(self, parser):
        line = next(parser.stream).lineno
        body = parser.parse_statements(["name:endgeneration"], drop_needle=True)
        return nodes.CallBlock(self.call_method("_body"), [], [], body).set_lineno(line)

    def _body(self, caller):
        return caller()


def environment():
    env = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols]
    )

    def tojson(value, ensure_ascii=False, indent=None, separators=None, sort_keys=False):
        return json.dumps(
            value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys
        )

    def raise_exception(message):
        raise TemplateError(message)

    env.filters["tojson"] = tojson
    # jinja2 escapes what is added to a safe text for HTML. llama.cpp does not, and no author of a template wants it.
    env.filters["safe"] = lambda value: value
    env.globals["raise_exception"] = raise_exception
    env.globals["strftime_now"] = lambda text: NOW.strftime(text)
    env.globals |= {"bos_token": "<s>", "eos_token": "</s>", "tools": None, "documents": None}
    return env


def message(role, content, **others):
    return {"role": role, "content": content, **others}


def call(arguments):
    return {"type": "function", "id": "call00001", "function": {"name": "weather", "arguments": arguments}}


TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "weather",
            "description": "The weather <now> & \"later\" in a city's centre: 20 °C",
            "parameters": {
                "type": "object",
                "properties": {
                    "city": {"type": "string", "description": "A name", "enum": ["Oslo", "Åsa"]},
                    "days": {"type": "integer", "default": 3},
                    "exact": {"type": "boolean", "default": True},
                    "scale": {"type": "number", "default": 1.5},
                    "tags": {"type": "array", "items": {"type": "string"}},
                },
                "required": ["city"],
            },
        },
    },
    {"type": "function", "function": {"name": "stop", "description": "Ends", "parameters": {"type": "object", "properties": {}}}},
]

SYSTEM = message("system", "Be brief.\n")
USER = message("user", "Hello!")
TALK = [USER, message("assistant", "Hi, you."), message("user", " What's <this> & \"that\"?\n\n{{ 1 + 1 }} 日本 🦀 ")]
THOUGHT = [USER, message("assistant", "<think>\nA greeting.\n</think>\n\nHi."), message("user", "And now?")]
REASONED = [USER, message("assistant", "Hi.", reasoning_content="A greeting."), message("user", "And now?")]
PARTS = [message("user", [{"type": "text", "text": "One."}, {"type": "text", "text": "Two."}])]


def asked(arguments):
    return [
        message("user", "Rain?"),
        message("assistant", "", tool_calls=[call(arguments)]),
        message("tool", '{"rain": true}', name="weather", tool_call_id="call00001"),
    ]


CASES = {
    "user": {"messages": [USER]},
    "system": {"messages": [SYSTEM, USER]},
    "talk": {"messages": TALK},
    "system and talk": {"messages": [SYSTEM, *TALK]},
    "end of talk": {"messages": TALK[:2], "add_generation_prompt": False},
    "thought": {"messages": THOUGHT},
    "reasoned": {"messages": [SYSTEM, *REASONED]},
    "not thinking": {"messages": TALK, "enable_thinking": False},
    "parts": {"messages": PARTS},
    "tools": {"messages": [SYSTEM, USER], "tools": TOOLS},
    "tool call": {"messages": asked({"city": "Åsa", "days": 2, "exact": None, "tags": ["a", "b's"]}), "tools": TOOLS},
    "tool call as text": {"messages": [SYSTEM, *asked('{"city": "Oslo"}')], "tools": TOOLS},
    "two users": {"messages": [USER, USER]},
    "nothing": {"messages": []},
}


def render(folder):
    env = environment()
    for path in sorted(folder.glob("*.jinja")):
        source = path.read_text(encoding="utf-8")
        for case, variables in CASES.items():
            row = {"template": path.name, "case": case, "variables": {"add_generation_prompt": True, **variables}}
            try:
                row["text"] = env.from_string(source).render(row["variables"])
            except Exception as error:  # a template's Python may fail in any way
                row["error"] = f"{type(error).__name__}: {error}"
            print(json.dumps(row))


def compare():
    from servers import ROOT
    from upstream import archive, run_unit_test

    templates = archive(ROOT / "target/upstream") / "models/templates"
    sys.exit(run_unit_test("chat::tests::templates_of_a_folder_render_as_jinja2_does", FANOUT_CHAT_TEMPLATES=str(templates)))


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--render", type=Path, metavar="FOLDER", help="render the .jinja files of a folder, and print the texts")
    folder = parser.parse_args().render
    render(folder) if folder else compare()


if __name__ == "__main__":
    main()
