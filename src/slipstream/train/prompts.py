"""What targets are asked, so that heads learn from their answers: prompts of ours, or of files.

Besides, a target makes prompts up: given the opening of a user's turn it writes what users write.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from itertools import product, takewhile
from pathlib import Path

from slipstream.core.errors import ConfigError
from slipstream.core.params import SamplingParams
from slipstream.loading.jsonl import read_jsonl
from slipstream.train.texts import Answer, Ask

Encode = Callable[[str], list[int]]

_MADE_UP = 3  # all but one in so many of the built-in prompts are the target's
_MESSAGE_TOKENS = 96  # of such a message, at most
# Of a document: where the target goes on, and how far ahead it is asked again.
_DOCUMENT_TOKENS = 64
_DOCUMENT_STRIDE = 384


def asker(sources: Sequence[str], chat: Encode, encode: Encode, answer: Answer, seed: int) -> Ask:
    """The prompts of texts, which take turns with the sources.

    Args:
        sources: "builtin", JSONL files of prompts, or folders of documents.
        chat: a user's message to the ids of a conversation, up to the answer.
        encode: a text to its ids.

    Raises:
        ConfigError: a source that is none of these.
    """
    asks = [_ask(source, chat, encode, answer, seed) for source in sources]

    def ask(indices: Sequence[int]) -> list[list[int]]:
        prompts: dict[int, list[int]] = {}
        for which, each in enumerate(asks):
            mine = [index for index in indices if index % len(asks) == which]
            prompts |= zip(mine, each([index // len(asks) for index in mine]), strict=True)
        return [prompts[index] for index in indices]

    return ask


def _ask(source: str, chat: Encode, encode: Encode, answer: Answer, seed: int) -> Ask:
    path = Path(source)
    if source == "builtin":
        return _ask_builtin(chat, answer, seed)
    if path.is_dir():
        documents = [encode(text) for text in read_documents(path)]
        pieces = [
            tokens[start : start + _DOCUMENT_TOKENS]
            for tokens in documents
            for start in range(0, max(len(tokens) - _DOCUMENT_TOKENS, 1), _DOCUMENT_STRIDE)
        ]
        return lambda indices: [pieces[index % len(pieces)] for index in indices]
    if path.is_file():
        prompts = read_prompts(path)
        return lambda indices: [chat(prompts[index % len(prompts)]) for index in indices]
    raise ConfigError(f"no data {source!r}; give builtin, a JSONL file, or a folder of documents")


def _ask_builtin(chat: Encode, answer: Answer, seed: int) -> Ask:
    turn, ours = Turn.of(chat), builtin_prompts()

    def ask(indices: Sequence[int]) -> list[list[int]]:
        made_up = [index for index in indices if index % _MADE_UP]
        prompts = dict(zip(made_up, make_up_prompts(turn, answer, made_up, seed), strict=True))
        return [
            prompts[index] if index in prompts else chat(ours[index // _MADE_UP % len(ours)])
            for index in indices
        ]

    return ask


@dataclass(frozen=True, slots=True)
class Turn:
    """What stands before a user's message and between it and the answer, as token ids."""

    before: list[int]
    after: list[int]

    @classmethod
    def of(cls, encode: Encode) -> "Turn":
        """Of a chat template: what stays when the message changes.

        Args:
            encode: a user's message to the ids of the conversation up to the answer.
        """
        first, second = encode("0"), encode("x")
        return cls(_shared(first, second), _shared(first[::-1], second[::-1])[::-1])

    def around(self, message: list[int]) -> list[int]:
        """A whole prompt."""
        return self.before + message + self.after


def _shared(first: list[int], second: list[int]) -> list[int]:
    """What two lists begin with."""
    pairs = zip(first, second, strict=False)
    return [a for a, b in takewhile(lambda pair: pair[0] == pair[1], pairs)]


def make_up_prompts(
    turn: Turn, answer: Answer, indices: Sequence[int], seed: int
) -> list[list[int]]:
    """Conversations whose user is the target, [B]; messages that do not end are cut."""
    params = [
        SamplingParams(temperature=1.0, seed=seed + index, max_tokens=_MESSAGE_TOKENS)
        for index in indices
    ]
    written = answer([turn.before] * len(indices), params)
    ends = set(turn.after[:1])
    return [turn.around([token for token in message if token not in ends]) for message in written]


_TASKS = (
    "Explain {} to a child of ten.",
    "What are the main advantages and disadvantages of {}?",
    "Write a short story in which {} matters.",
    "Give five practical tips about {}.",
    "Write an email to a friend who asked me about {}.",
    "Summarise what is known about {} in one paragraph.",
    "How did {} change over the last hundred years?",
    "Write a poem of three verses about {}.",
    "List ten words that have to do with {} and say what each means.",
    "What would happen if there were suddenly no {}?",
    "Compare {} with something similar and say where they differ.",
    "Draft an outline for a talk about {}.",
    "Answer in two sentences: why do people care about {}?",
    "Write a dialogue between a teacher and a student about {}.",
    "What mistakes do beginners make with {}?",
    "Write a product description that mentions {}.",
    "Which questions should I ask an expert on {}?",
    "Make a table in plain text with three facts about {}.",
    "Write a news report about {}.",
    "Describe the history of {} step by step.",
    "Can you recommend how to learn more about {}?",
    "Write a speech of one minute in favour of {}.",
    "Translate into French and then explain: a sentence about {}.",
    "Invent a quiz of four questions, with answers, about {}.",
)
_SUBJECTS = (
    *("bicycles", "black holes", "bread baking", "the Roman Empire", "volcanoes", "chess"),
    *("solar panels", "the human heart", "jazz", "public libraries", "glaciers", "honey bees"),
    *("the printing press", "vaccines", "suspension bridges", "coral reefs", "tea", "migration"),
    *("the immune system", "electric cars", "photosynthesis", "pottery", "inflation", "dreams"),
    *("the French Revolution", "sleep", "earthquakes", "penguins", "recycling", "marathon running"),
    *("the water cycle", "opera", "antibiotics", "gardening", "satellites", "the Silk Road"),
    *("memory", "wind power", "cheese", "probability", "whales", "the Great Wall of China"),
    *("stress at work", "origami", "plate tectonics", "coffee", "deserts", "friendship"),
    *("artificial intelligence", "lighthouses", "the stock market", "rainforests", "violins"),
    *("dental care", "time zones", "the Moon", "job interviews", "spiders", "democracy"),
    *("cooking rice", "electricity", "the Olympic Games", "fermentation", "owls", "budgets"),
    *("healthy breakfasts", "mountain climbing", "the periodic table", "film making", "snow"),
    *("internet privacy", "the nervous system", "tulips", "robots", "yoga", "city planning"),
    *("dinosaurs", "mental health", "train travel", "perfume", "the Renaissance", "batteries"),
)
_PROGRAMS = (
    *("reverses a string", "checks whether a number is prime", "counts the words in a file"),
    *("sorts a list of dictionaries by a key", "computes Fibonacci numbers", "merges two lists"),
    *("finds the most frequent element", "validates an email address", "parses a CSV line"),
    *("converts temperatures", "draws a triangle of stars", "removes duplicates from a list"),
    *("implements a stack", "implements a queue with two stacks", "flattens nested lists"),
    *("computes a moving average", "checks for balanced brackets", "searches a sorted list"),
    *("reads a JSON file and prints its keys", "computes the greatest common divisor"),
    *("counts vowels", "transposes a matrix", "generates a random password", "solves Sudoku"),
)
_CODE_TASKS = (
    "Write a Python function that {}.",
    "Write a JavaScript function that {} and explain how it works.",
    "Show me a Python program that {}, with comments.",
    "Write a unit test for a function that {}.",
)
_STRIDE = 997  # shares no factor with the number of prompts
_SUMS = (
    "A shop sells {a} apples in the morning and {b} in the afternoon. How many does it sell in "
    "{c} days at that rate?",
    "What is {a} times {c}, plus {b}? Show every step.",
    "A train covers {b} km in {c} hours. How far does it come in {a} hours?",
    "If {c} notebooks cost {a} dollars, what do {b} notebooks cost?",
    "Anna is {a} years old and {c} years older than Ben. How old will Ben be in {b} years?",
)


def builtin_prompts() -> list[str]:
    """Two thousand prompts of ours, kinds mixed."""
    asked = [task.format(subject) for subject, task in product(_SUBJECTS, _TASKS)]
    coded = [task.format(program) for program, task in product(_PROGRAMS, _CODE_TASKS)]
    numbers = [(12 + 7 * i, 30 + 11 * i, 2 + i % 7) for i in range(20)]
    summed = [task.format(a=a, b=b, c=c) for (a, b, c), task in product(numbers, _SUMS)]
    prompts = asked + coded + summed
    return [prompts[_STRIDE * i % len(prompts)] for i in range(len(prompts))]


def read_prompts(path: Path) -> list[str]:
    """Prompts of a JSONL file: the `prompt`, `turns` or `messages` of each line.

    Raises:
        ConfigError: a line is something else, or there is none.
    """
    expected = "a JSON object with prompt, turns or messages"
    prompts = read_jsonl(path, _first_turn, expected)
    if not prompts:
        raise ConfigError(f"{path} has no prompts")
    return prompts


def _first_turn(entry: dict) -> str:
    if "messages" in entry:
        text = next(each["content"] for each in entry["messages"] if each["role"] == "user")
    else:
        text = entry["turns"][0] if "turns" in entry else entry["prompt"]
    if not isinstance(text, str):
        raise TypeError
    return text


# What a folder of documents may hold.
_SUFFIXES = (".txt", ".md", ".rst", ".py", ".c", ".h", ".cpp", ".js", ".json", ".html")


def read_documents(folder: Path) -> Iterator[str]:
    """The texts of a folder and those below, in order of their paths.

    Raises:
        ConfigError: there is none.
    """
    paths = sorted(path for path in folder.rglob("*") if path.suffix in _SUFFIXES)
    if not paths:
        raise ConfigError(f"{folder} has no files of {', '.join(_SUFFIXES)}")
    for path in paths:
        yield path.read_text(encoding="utf-8", errors="ignore")
