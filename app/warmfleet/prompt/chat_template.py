"""A chat template, compiled as transformers compiles it, with the facts that vLLM reads from its syntax tree."""

from __future__ import annotations

import json
from collections import deque
from datetime import datetime
from types import BuiltinMethodType
from typing import TYPE_CHECKING, Any

import jinja2
import jinja2.compiler
import jinja2.ext
import jinja2.meta
import jinja2.runtime
import jinja2.sandbox
from jinja2 import nodes

from warmfleet.prompt.messages import Format, Message, NotReproducible

if TYPE_CHECKING:
    from collections.abc import Iterator

#: Parameters of transformers' apply_chat_template that a request may set even if the template does not name them.
BASE_PARAMETERS = frozenset({"add_generation_prompt", "continue_final_message", "documents"})
_NAMES_OF_DICT = frozenset(dir(dict))
#: Parameters that apply_chat_template uses up itself, so that no template ever sees them.
SWALLOWED = frozenset(
    {
        *("conversation", "chat_template", "tokenize", "padding", "truncation", "max_length", "return_tensors"),
        *("return_dict", "return_assistant_tokens_mask", "tokenizer_kwargs"),
    }
)
_CONTINUE_TAG = "CONTINUE_FINAL_MESSAGE_TAG "


class GenerationTag(jinja2.ext.Extension):
    """``{% generation %}`` marks text that the model wrote. Rendering passes this text through unchanged."""

    tags = {"generation"}  # noqa: RUF012  jinja2's own declaration

    def parse(self, parser: Any) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.CallBlock(self.call_method("_through"), [], [], body).set_lineno(line)

    def _through(self, caller: Any) -> str:
        return str(caller())


class DirectCode(jinja2.compiler.CodeGenerator):
    """Compiles ``message.role`` to a look into a plain dict, without a call: templates read hundreds of such fields."""

    def visit_Getattr(self, node: nodes.Getattr, frame: Any) -> None:  # noqa: N802  jinja2 finds it by this name
        if not isinstance(node.node, nodes.Name) or node.attr in _NAMES_OF_DICT:
            super().visit_Getattr(node, frame)
            return
        self._write_look(node.node, repr(node.attr), "getattr", frame)

    def visit_Getitem(self, node: nodes.Getitem, frame: Any) -> None:  # noqa: N802
        """Compile ``message["role"]`` to the same look into a plain dict."""
        key = node.arg.value if isinstance(node.arg, nodes.Const) else None
        if not isinstance(node.node, nodes.Name) or not isinstance(key, str):
            super().visit_Getitem(node, frame)
            return
        self._write_look(node.node, repr(key), "getitem", frame)

    def _write_look(self, owner: nodes.Name, key: str, otherwise: str, frame: Any) -> None:
        """Write ``owner[key]`` for a plain dict that has the key. ``otherwise``: the method that looks elsewhere."""
        for before in ("(", f"[{key}] if type(", f") is dict and {key} in ", f" else environment.{otherwise}("):
            self.write(before)
            self.visit(owner, frame)
        self.write(f", {key}))")


class DirectContext(jinja2.runtime.Context):
    """Calls a method that is written in C, such as ``content.startswith``, without looking for jinja2's marks on it."""

    def call(__self, __obj: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: N805  jinja2's own declaration
        if type(__obj) is not BuiltinMethodType:
            return super().call(__obj, *args, **kwargs)
        kwargs.pop("_block_vars", None)
        kwargs.pop("_loop_vars", None)
        try:
            return __obj(*args, **kwargs)
        except StopIteration:
            return __self.environment.undefined("a callable raised StopIteration")


class PlainEnvironment(jinja2.Environment):
    """For templates that the operator trusts: no sandbox, and ``message.role`` looks into a plain dict first."""

    code_generator_class = DirectCode
    context_class = DirectContext

    def getattr(self, obj: Any, attribute: str) -> Any:
        if type(obj) is dict and attribute not in _NAMES_OF_DICT:
            return obj[attribute] if attribute in obj else self.undefined(obj=obj, name=attribute)
        try:
            return getattr(obj, attribute)
        except AttributeError:
            return super().getattr(obj, attribute)


class ChatTemplate:
    """A compiled template. The constructor raises jinja2.TemplateError if the source does not compile."""

    state = "approved"

    def __init__(self, source: str, content_format: str = "auto", *, trusted: bool = False) -> None:
        kind = PlainEnvironment if trusted else jinja2.sandbox.ImmutableSandboxedEnvironment
        environment = kind(trim_blocks=True, lstrip_blocks=True, extensions=[GenerationTag, jinja2.ext.loopcontrols])
        environment.filters["tojson"] = _tojson
        environment.globals["raise_exception"] = _raise_exception
        environment.globals["strftime_now"] = _strftime_now
        tree = environment.parse(source)
        self._template = environment.from_string(source)
        self._environment = environment
        # Every render copies the globals, and a ChainMap is slow to copy.
        self._template.globals = self._globals = dict(self._template.globals)
        self._names = frozenset(jinja2.meta.find_undeclared_variables(tree)) - SWALLOWED | BASE_PARAMETERS
        self.knows_developer = knows_developer(source)
        detected: Format = "openai" if any(_content_loops(tree)) else "string"
        self.content_format: Format = content_format if content_format in ("string", "openai") else detected  # type: ignore[assignment]  # one of the two words

    @property
    def local(self) -> ChatTemplate:
        """This template, which renders in this process. (``WorkerTemplate.local`` is None until it is approved.)"""
        return self

    def render(self, messages: list[Message], arguments: dict[str, Any], fixed: dict[str, Any]) -> str:
        """Render the prompt text. Of ``arguments`` the template gets those that it names; of ``fixed`` it gets all.

        Raises NotReproducible if the template refuses the messages; the engine then tells the client why.
        """
        names = self._names
        arguments = {name: value for name, value in arguments.items() if name in names}
        continues = arguments.pop("continue_final_message", False)
        if "messages" in arguments:  # transformers refuses two values of one name
            raise NotReproducible("template")
        try:
            if continues:
                return self._continued(messages, {**fixed, **arguments})
            return self._rendered({**self._globals, "messages": messages, **fixed, **arguments})
        except (NotReproducible, MemoryError):
            raise
        except Exception as error:  # a template may raise any exception
            raise NotReproducible("template") from error

    def _rendered(self, values: dict[str, Any]) -> str:
        """Render as jinja2's ``Template.render``, but without its two copies of the values and its own tracebacks."""
        template = self._template
        context = self._environment.context_class(self._environment, values, None, template.blocks, self._globals)
        return "".join(template.root_render_func(context))

    def _continued(self, messages: list[Message], arguments: dict[str, Any]) -> str:
        # As in transformers, a tag behind the last message shows where the text of the template must be cut off.
        last = dict(messages[-1])
        content = last["content"]
        if isinstance(content, list):
            if not content:
                raise NotReproducible("template")
            final = content[-1]["text"]
            last["content"] = [*content[:-1], content[-1] | {"text": final + _CONTINUE_TAG}]
        else:
            final, last["content"] = content, content + _CONTINUE_TAG
        text = self._rendered({**self._globals, **arguments, "messages": [*messages[:-1], last]})
        tag = _CONTINUE_TAG.strip()
        if tag not in text or final.strip() not in text:
            raise NotReproducible("template")
        end = text.rindex(tag)
        return text[:end] if text[end : end + len(_CONTINUE_TAG)] == _CONTINUE_TAG else text[:end].rstrip()


def knows_developer(source: str) -> bool:
    """Return whether the template names the role ``developer``, by the test that vLLM makes."""
    return '"developer"' in source or "'developer'" in source


def _tojson(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    return json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _strftime_now(form: str) -> str:
    return datetime.now().strftime(form)  # noqa: DTZ005  the engine uses its local time as well


# ------------------------------------------------------------ does the template loop over a message's content?
# vLLM gives a list of parts ("openai") to a template that loops over the content of messages, and one joined text
# ("string") to all others. The rules are those of vllm/renderers/hf.py, so that the content format "auto" means the
# same in vLLM and in the router.


def _reads(node: nodes.Node | None, name: str, key: str | None = None) -> bool:
    """Return whether ``node`` reads the variable ``name`` (or its ``key``), perhaps through filters and slices."""
    while isinstance(node, nodes.Filter | nodes.Test) or (
        isinstance(node, nodes.Getitem) and isinstance(node.arg, nodes.Slice)
    ):
        node = node.node
    if key is not None:
        node = _owner(node, key)
    return isinstance(node, nodes.Name) and node.ctx == "load" and node.name == name


def _owner(node: nodes.Node | None, key: str) -> nodes.Node | None:
    """Return the node ``x`` of ``x[key]`` or ``x.key``; None for any other node."""
    if isinstance(node, nodes.Getitem):
        return node.node if isinstance(node.arg, nodes.Const) and node.arg.value == key else None
    return node.node if isinstance(node, nodes.Getattr) and node.attr == key else None


def _aliases(tree: nodes.Template, name: str) -> list[str]:
    found, waiting = [name], deque([name])
    while waiting:
        current = waiting.popleft()
        for assign in tree.find_all(nodes.Assign):
            if _reads(assign.node, current) and isinstance(assign.target, nodes.Name):
                if assign.target.name not in found:
                    waiting.append(assign.target.name)
                found.append(assign.target.name)
    return found


def _message_names(tree: nodes.Template) -> list[str]:
    lists = _aliases(tree, "messages")
    return [
        loop.target.name
        for loop in tree.find_all(nodes.For)
        if isinstance(loop.target, nodes.Name) and any(_reads(loop.iter, name) for name in lists)
    ]


def _content_loops(tree: nodes.Template) -> Iterator[nodes.For]:
    messages = _message_names(tree)
    parameters, in_macros = _macro_contents(tree, messages)
    for loop in tree.find_all(nodes.For):
        direct = any(_reads(loop.iter, name, "content") for name in messages)
        bare = isinstance(loop.iter, nodes.Name) and (
            loop.iter.name in parameters.get(id(loop), ())
            or (loop.iter.name == "content" and id(loop) not in in_macros)
        )
        if direct or bare:
            yield loop


def _macro_contents(tree: nodes.Template, messages: list[str]) -> tuple[dict[int, set[str]], set[int]]:
    """Return for each loop in a macro the macro's parameters that receive a message's content, and all such loops."""
    parameters: dict[int, set[str]] = {}
    loops: set[int] = set()
    for macro in tree.find_all(nodes.Macro):
        names = [argument.name for argument in macro.args]
        content: set[str] = set()
        for call in tree.find_all(nodes.Call):
            if not isinstance(call.node, nodes.Name) or call.node.name != macro.name:
                continue
            passed = [*zip(names, call.args, strict=False), *((item.key, item.value) for item in call.kwargs)]
            content |= {
                name
                for name, value in passed
                if name in names and any(_reads(value, message, "content") for message in messages)
            }
        for loop in macro.find_all(nodes.For):
            loops.add(id(loop))
            if content:
                parameters[id(loop)] = content
    return parameters, loops
