"""Random requests of every shape that a router must understand. ``asks(seed, count)`` repeats itself for the same seed.

Most look like requests of real clients. Some are mistakes that clients make, or hand a model's answer back unchanged.
The engine refuses a few of them; the caller has to skip these.
"""

from __future__ import annotations

import json
import random
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tests.support.requests.client_mistakes import ODDITIES

if TYPE_CHECKING:
    from collections.abc import Callable

Body = dict[str, Any]

PROSE = (
    *("The", "quick", "brown", "fox", "jumps", "over", "the", "lazy", "dog.", "Nobody", "knows", "why,", "and", "it"),
    *("doesn't", "matter:", "we've", "seen", "it,", "they'll", "see", "it.", "I'm", "SHOUT'S", "x"),
)
SCRIPTS = (
    *(
        "中文字符没有空格",
        "日本語の文章です。",
        "Привет, мир",
        "مرحبا بالعالم",
        "שלום עולם",
        "한국어 문장",
        "ไทยไม่มีช่องว่าง",
    ),
    *(
        "é",
        "e\u0301",
        "ñ",
        "n\u0303",
        "\ufb01",
        "①",
        "Å",
        "A\u030a",
        "가",
        "\u1100\u1161",
        "ⅷ",
        "ﬀ",
    ),  # NFC and NFKC differ
    *("😀", "👩\u200d👩\u200d👧", "🇩🇪", "👍🏽", "🏴\U000e0067\U000e0062\U000e007f", "❤\ufe0f"),
)
CODE = (
    "def f(x: int) -> int:\n    return x ** 2\n",
    "for (let i = 0; i < 10; ++i) {\n\tconsole.log(`${i}`);\n}\n",
    '{"k": [1, null, true, -2.5e-3], "s": "a\\nb\\u00e9"}',
    "SELECT * FROM t WHERE a = 'it''s' -- no\n",
    '<div class="x">&amp; &lt;</div>',
    "https://example.org/a/b?c=d&e=%20#f",
    "$ cat /etc/hosts | grep -v '^#'",
    "\\begin{align} x^2 &= \\frac{1}{2} \\end{align}",
)
SPACES = ("   ", "\t\t", "\n\n\n", "\r\n", " \n ", "\u00a0", "\u3000", "\u200b", " " * 40, "\n" * 20, "\t \t ")
ODD = ("a" * 60, "=" * 50, "0123456789" * 4, "3.14159", "1,234,567", "-0", "\x00", "\x7f", "\ufffd", "\U0010ffff")
#: Strings with a special meaning in the templates and tokenizers of the three families.
SPECIAL = (
    *(
        "<|im_start|>",
        "<|im_end|>",
        "<|endoftext|>",
        "<|vision_pad|>",
        "<|begin_of_text|>",
        "<|eot_id|>",
        "<|python_tag|>",
    ),
    *("<|start_header_id|>", "<|end_header_id|>", "<|reserved_special_token_7|>", "<s>", "</s>", "<unk>", "<0x0A>"),
    *("<think>", "</think>", "<tool_call>", "</tool_call>", "<tool_response>", "</tool_response>", "[INST]", "[/INST]"),
    *("<|im_start", "|im_end|>", "▁", "Ġ", "{{ messages }}", "{% raw %}", "{#", "CONTINUE_FINAL_MESSAGE_TAG ", "%s"),
    *("<##IMAGE##>", "x-anthropic-billing-header: cch=1;\n"),
)
WORD_KINDS = ((PROSE, 60), (SCRIPTS, 12), (CODE, 7), (SPACES, 8), (ODD, 4), (SPECIAL, 9))
NAMES = ("search", "get_weather", "multiply", "créer", "a.b-c_d")
#: No single letters: equal ones may be one Python object or two, and pickle, hence ``sha256``, tells these apart.
SALTS = ("tenant-a", "tenant-b", "tenant-é", "a" * 100, "\u79df\u6237")
ADAPTERS = (("ad", "/adapters/ad"), ("é-ad", "/adapters/é"), ("\u79df\u6237", "org/\u79df\u6237"))
EFFORTS = ("none", "minimal", "low", "medium", "high")


@dataclass
class RandomRequest:
    """A request. shape: the features that it uses. lora: name and path of the adapter that it asks for."""

    endpoint: Literal["completions", "chat", "messages", "responses"]
    body: Body
    lora: tuple[str, str] | None = None
    shape: set[str] = field(default_factory=set)

    @property
    def raw(self) -> bytes:
        return json.dumps(self.body, ensure_ascii=False).encode()


def random_requests(seed: int, count: int, vocabulary: int = 8_000) -> list[RandomRequest]:
    """Return ``count`` requests, three chats for each completion. Token ids stay below ``vocabulary``."""
    maker = Maker(seed, vocabulary)
    made = [maker.completion() if index % 4 == 3 else maker.chat() for index in range(count)]
    for request in made[::5]:
        request.lora = maker.random.choice(ADAPTERS)
    return made


class Maker:
    """Makes requests from one stream of random numbers."""

    def __init__(self, seed: int, vocabulary: int = 8_000) -> None:
        self.random = random.Random(seed)
        self._vocabulary = vocabulary
        self._odd_ones: list[Callable[[Maker, RandomRequest], None]] = []
        self._groups = [words for words, _ in WORD_KINDS]
        self._weights = [weight for _, weight in WORD_KINDS]

    def chance(self, odds: float) -> bool:
        return self.random.random() < odds

    def text(self, words: int | None = None) -> str:
        """Return up to a few hundred words of all kinds, or nothing."""
        rng = self.random
        if words is None:
            words = rng.choice((0, 1, 1, 3, 8, 8, 20, 40, 120))
        made = []
        for group in rng.choices(self._groups, self._weights, k=words):
            made.append(rng.choice(group))
            made.append(rng.choice((" ", " ", " ", " ", "", "\n")))
        return "".join(made)[: rng.choice((None, None, -1))]

    # ------------------------------------------------ chat

    def chat(self) -> RandomRequest:
        request = RandomRequest("chat", {"model": "m"})
        self._tools(request)
        request.body["messages"] = self._messages(request)
        self._options(request)
        if self.chance(0.5):
            self._odd(request)
        return request

    def _messages(self, request: RandomRequest) -> list[Body]:
        rng = self.random
        turns = rng.choice((1, 1, 1, 2, 2, 3, 4, 6, 10, 20, 60))
        messages: list[Body] = []
        if self.chance(0.5):
            messages.append({"role": "system", "content": self.content(request)})
        for turn in range(turns):
            messages.append({"role": "user", "content": self.content(request)})
            if turn < turns - 1 or self.chance(0.1):
                messages += self._answer(request)
        if messages[-1]["role"] == "assistant" and self.chance(0.7):
            request.body |= {"add_generation_prompt": False, "continue_final_message": True}
            messages[-1].pop("tool_calls", None)
            messages[-1]["content"] = self.text(5) + "word" + rng.choice(("", " ", "\n"))
            request.shape.add("continue_final_message")
        return messages

    def content(self, request: RandomRequest) -> Any:
        if self.chance(0.75):
            return self.text()
        request.shape.add("parts")
        return [{"type": "text", "text": self.text()} for _ in range(self.random.choice((1, 1, 2, 3)))]

    def _answer(self, request: RandomRequest) -> list[Body]:
        """Return an assistant's turn with its reasoning, and the results of the tools that it called."""
        answer: Body = {"role": "assistant", "content": self.content(request)}
        if self.chance(0.2):
            answer[self.random.choice(("reasoning", "reasoning_content"))] = self.text()
            request.shape.add("reasoning")
        if self.chance(0.1):
            answer["content"] = f"<think>\n{self.text(5)}\n</think>\n\n{self.text(5)}"
        if "tools" not in request.body or self.chance(0.4):
            return [answer]
        request.shape.add("tool_calls")
        answer["tool_calls"] = [self.call() for _ in range(self.random.choice((1, 1, 1, 2)))]
        if self.chance(0.4):
            answer["content"] = None
        results: list[Body] = [
            {"role": "tool", "tool_call_id": call["id"], "content": self.content(request)}
            for call in answer["tool_calls"]
        ]
        return [answer, *results, *([{"role": "assistant", "content": self.text()}] if self.chance(0.6) else [])]

    def call(self) -> Body:
        arguments = self._value(3) if self.chance(0.1) else {"q": self.text(3), "n": self._value(1)}
        text = json.dumps(arguments, ensure_ascii=self.chance(0.5))
        if self.chance(0.05):
            text = self.random.choice(("", "not json", "{", "[]", "null", "NaN", '{"a": NaN}', '"{}"'))
        call: Body = {
            "id": f"call_{self.random.randrange(10**6)}",
            "type": "function",
            "function": {"name": self.random.choice(NAMES), "arguments": text},
        }
        if self.chance(0.1):
            call["function"]["description"] = None
            call |= {"index": 0, "extra": {"a": 1}}
        return call

    def _value(self, depth: int) -> Any:
        """Return any JSON value. Numbers have the sizes at which parsers differ."""
        rng = self.random
        kind = rng.randrange(8 if depth > 0 else 6)
        if kind == 6:
            return [self._value(depth - 1) for _ in range(rng.randrange(4))]
        if kind == 7:
            return {self.text(1): self._value(depth - 1) for _ in range(rng.randrange(4))}
        numbers = (0, -1, 7, 2**31, 2**53 + 1, 2**63, -(2**63), 2**64 - 1)
        floats = (0.5, -0.0, 1.0, 1e16, 1e-7, 123456789.123, 1e300)
        return (None, True, rng.choice(numbers), rng.choice(floats), self.text(2), "é\u2028<b>")[kind]

    # ------------------------------------------------ tools and options

    def _tools(self, request: RandomRequest) -> None:
        if not self.chance(0.3):
            return
        request.shape.add("tools")
        tools = [self._tool(name) for name in self.random.sample(NAMES, self.random.choice((1, 1, 2, 4)))]
        request.body["tools"] = tools
        named = {"type": "function", "function": {"name": tools[0]["function"]["name"]}}
        choice = self.random.choice((None, None, "auto", "none", "required", named))
        if choice is not None:
            request.body["tool_choice"] = choice
            request.shape.add("tool_choice")

    def _tool(self, name: str) -> Body:
        function: Body = {"name": name}
        if self.chance(0.8):
            function["description"] = self.text(6)
        if self.chance(0.8):
            properties = {"q": {"type": "string", "enum": [self.text(1), "é"]}, "n": {"default": self._value(2)}}
            function["parameters"] = {"type": "object", "properties": properties, "required": ["q"]}
        if self.chance(0.2):
            function["strict"] = self.chance(0.5)
        tool = {"type": "function", "function": function}
        return {"function": function} if self.chance(0.05) else tool

    def _options(self, request: RandomRequest) -> None:
        rng, body = self.random, request.body
        extra: list[tuple[float, str, Any]] = [
            (0.1, "chat_template_kwargs", {"enable_thinking": rng.choice((True, False)), "unknown": 1}),
            (0.05, "chat_template_kwargs", {"date_string": "1 May 2031", "custom": self.text(1)}),
            (0.08, "reasoning_effort", rng.choice(EFFORTS)),
            (0.08, "documents", [{"title": self.text(2), "text": self.text(9)} for _ in range(2)]),
            (0.1, "add_special_tokens", self.chance(0.5)),
            (0.15, "cache_salt", rng.choice(SALTS)),
            (0.2, "max_tokens", rng.randrange(1, 64)),
            (0.1, "temperature", 0.5),
            (0.05, "stop", ["\n"]),
            (0.05, "user", "somebody"),
        ]
        for odds, name, value in extra:
            if self.chance(odds):
                body[name] = value
                request.shape.add(name)
        if "continue_final_message" not in body and self.chance(0.1):
            body["add_generation_prompt"] = self.chance(0.5)

    def _odd(self, request: RandomRequest) -> None:
        """Return a request of a shape that is easy to get wrong."""
        if not self._odd_ones:  # each once before any comes again
            self._odd_ones = self.random.sample(ODDITIES, len(ODDITIES))
        odd = self._odd_ones.pop()
        odd(self, request)
        request.shape.add(odd.__name__)

    # ------------------------------------------------ completions

    def completion(self) -> RandomRequest:
        rng = self.random
        request = RandomRequest("completions", {"model": "m"})
        texts = [self.text(rng.choice((1, 5, 40, 200))) or "x" for _ in range(rng.choice((2, 2, 3, 6)))]
        ids = [[rng.randrange(self._vocabulary) for _ in range(rng.choice((1, 16, 33, 200)))] for _ in texts]
        prompts = (texts[0], texts[0], texts[0], texts, ids[0], ids)
        request.body["prompt"] = rng.choice(prompts)
        if self.chance(0.3):
            request.body["add_special_tokens"] = self.chance(0.5)
        if self.chance(0.2):
            request.body["cache_salt"] = "tenant-a"
        if self.chance(0.2):
            request.body |= {"n": 2, "echo": self.chance(0.5), "max_tokens": 4}
        request.shape.add("prompts" if isinstance(request.body["prompt"], list) else "prompt")
        return request
