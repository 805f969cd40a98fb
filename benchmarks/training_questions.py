"""Varied questions to train a drafter on, from public packages: a JSON-lines file for ``outrider train --questions``.

    python benchmarks/training_questions.py --wordnet DIR --evals DIR --reasoning-gym 6000 --output questions.jsonl

The package's templates know a few hundred words; a drafter trained on them alone is surprised by everything else.
Here their fields are filled from WordNet 3.0 (``--wordnet``: the folder of ``data.noun``, Debian's ``wordnet-base``),
and beside them go definitions and example sentences of WordNet, functions and docstrings of Python's standard library,
``--evals`` (the ``registry/data`` folder of the ``evals`` wheel: English prompts, at most 60 a task) and
``--reasoning-gym`` (that many tasks of its generators, if the package can be imported). Nothing of an evaluation set
goes in: a question that shares eight words in a row with a file of ``--exclude-prompts`` is dropped, and so are the
generators and tasks made from GSM8K and HumanEval. Everything is a function of the seed and the sources.
"""

from __future__ import annotations

import argparse
import ast
import importlib
import json
import random
import re
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

from outrider.train.prompts import TEMPLATES, fill, normalize, read_excluded

SHARES = {"template": 36, "essay": 22, "word": 16, "passage": 10, "python": 5, "evals": 8, "reasoning-gym": 3}
# Of the templates' categories; expository text is what a small drafter is short of.
CATEGORIES = {"stem": 2, "humanities": 2, "writing": 2, "roleplay": 1.5, "maths": 0.8, "coding": 0.8}
# WordNet's lexicographer files (lexnames(5)) that a template's field is filled from.
FIELDS = {
    "topic": (4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 17, 19, 20, 21, 22, 26, 27),
    "subject": (7, 8, 9, 19, 22, 24, 25, 26, 27),
    "movement": (4, 9, 11, 14, 28),
    "thing": (6, 13),
    "item": (5, 6, 13, 20),
    "place": (15, 17),
    "role": (18,),
    "person": (18,),
}
PER_TASK = 60
OVERLAP = 8  # words in a row
_SKIP_TASKS = {"diabetes", "naughty_strings", "sarcasm", "connect4", "algebra_word_problems", "base64_decode"}


@dataclass(frozen=True, slots=True)
class Sense:
    word: str
    gloss: str
    examples: tuple[str, ...]
    common: bool


def read_wordnet(folder: Path) -> dict[int, list[Sense]]:
    """Noun senses by lexicographer file; common: seen in WordNet's tagged text."""
    common = set()
    for line in (folder / "index.noun").read_text().splitlines():
        if not line.startswith("  "):
            parts = line.split()
            if int(parts[5 + int(parts[3])]):
                common.add(parts[0])
    senses: dict[int, list[Sense]] = {}
    for line in (folder / "data.noun").read_text().splitlines():
        if line.startswith("  "):
            continue
        head, _, gloss = line.partition("|")
        parts = head.split()
        meaning, *rest = re.split(r'; "', gloss.strip())
        word = parts[4]
        sense = Sense(
            word=word.replace("_", " "),
            gloss=meaning.strip(),
            examples=tuple(text.strip(' ";') for text in rest),
            common=word.lower() in common,
        )
        senses.setdefault(int(parts[1]), []).append(sense)
    return senses


class Words:
    """A word for a template's field; the package's own lists fill what WordNet does not."""

    def __init__(self, senses: dict[int, list[Sense]], tasks: Sequence[str], chance: random.Random) -> None:
        self.senses, self.tasks, self.chance = senses, tasks, chance
        self.common = {name: [s for s in group if s.common] for name, group in senses.items()}

    def sense(self, files: Sequence[int]) -> Sense:
        file = self.chance.choice(files)
        return self.chance.choice(self.common[file] if self.chance.random() < 0.75 else self.senses[file])

    def __call__(self, field: str) -> str | None:
        if field == "task" and self.tasks and self.chance.random() < 0.7:
            return self.chance.choice(self.tasks)
        if field not in FIELDS or self.chance.random() < 0.1:
            return None
        word = self.sense(FIELDS[field]).word
        proper = word[:1].isupper()
        if field == "item":
            return word if proper or word.endswith("s") else word + "s"
        if field in ("thing", "role", "person") and not proper:
            return f"{'an' if word[0] in 'aeiou' else 'a'} {word}"
        if field == "place" and not proper:
            return f"the {word}"
        return word


def about_words(words: Words) -> Iterator[str]:
    """Questions about single words, their definitions and their examples."""
    chance, everything = words.chance, sorted(words.senses)
    forms = (
        "What is {a}?", "What does the word {a} mean?", "Tell me something interesting about {a}.",
        "What is the difference between {a} and {b}?", "Define {a} and give two examples.",
        "Write a short story that mentions {a} and {b}.", "How is {a} related to {b}?",
        'Which word means "{g}"? Explain your answer.', 'Explain in your own words: "{g}".',
        "Give me five facts about {a}.", "Why is {a} important?", "Write a haiku about {a}.",
        "What are the advantages and disadvantages of {a}?", "How would you explain {a} to a child?",
        "Write a paragraph about {a} for an encyclopedia.", "Can you compare {a} with {b}?",
        "Who or what is {a}?", "Make a list of ten words that have to do with {a}.", "Where would I find {a}?",
        'Is it true that {a} means "{g}"? Answer and explain.', "Write a limerick about {a} and {b}.",
        "I need a title and a summary for a book about {a}.", "What can go wrong with {a}, and how do I avoid it?",
    )  # fmt: skip
    while True:
        file = chance.choice(everything)
        first, second = words.sense([file]), words.sense([file])
        yield chance.choice(forms).format(a=first.word, b=second.word, g=first.gloss)


def essays(words: Words) -> Iterator[str]:
    """Tasks whose answer is a longer piece of prose: explanations, discussions, and texts for some occasion."""
    chance = words.chance
    ideas, things = FIELDS["subject"] + FIELDS["movement"], (5, 6, 13, 20, 27)
    forms = (
        "What is {a}, what is {b}, and what do they have in common?",
        "Discuss how {a} and {b} affect each other, and mention {c}.",
        "Explain the basic ideas behind {a}. Who uses it, and what for?",
        "Describe the history of {a} from its beginnings to the present day.",
        "Which factors decide about {a}? Explain each of them briefly.",
        "Write an introduction to {a} for students who have heard of {b} but know little else.",
        "Give an overview of the theories about {a} and say what speaks against them.",
        "How would a scientist, an artist and a lawyer each talk about {a}?",
        "{a} means: {g}. Explain why it matters, and give two examples from everyday life.",
        "In two paragraphs, explain what {a} has to do with {b}.",
        "How does {t} work, which materials is it made of, and how is it looked after?",
        "Analyse the role of {a} in modern society. What might change in the next fifty years?",
        "What are common misunderstandings about {a}, and what is really the case?",
        "Describe the process behind {a} step by step, from the first cause to the final result.",
        "Write a speech about {a} for a meeting of people who care about {b}.",
        "Write a blog article about {a} that is personal and full of details about {p}.",
        "Write a formal letter to {r} in which you ask for help with {t} and explain the problem.",
        "Draft an announcement: our office will soon deal with {a}. Be brief, friendly and clear.",
        "Write a review of a film about {a}. Talk about the story, the actors and the music.",
        "Begin a novel in which {r} finds {t} in {p}. Use vivid language.",
        "Describe a morning in {p} with all five senses; mention {t} and {u}.",
        "Write a scene between {r} and {s} who disagree about {a}.",
        "As {r}, tell me what you think about {a} and how it has shaped your life.",
        "You are {r}. Explain {a} in your own way of speaking, with a comparison to {t}.",
        "Make a plan for a course of four weeks about {a}. Name the goal of every week.",
        "What should a company consider before it invests in {t}? List points for and against.",
        "Compare {t} and {u}: cost, use, durability and effect on the environment.",
        "What would the world look like without {a}? Give reasons.",
        "Summarise what is known about {a} in five sentences, then ask three questions that are still open.",
        "Someone claims that {a} causes {b}. How could the claim be tested?",
    )  # fmt: skip
    while True:
        first, second, third = (words.sense([chance.choice(ideas)]) for _ in range(3))
        goods = [words.sense([chance.choice(things)]).word for _ in range(2)]
        people = [words("role") or "a teacher" for _ in range(2)]
        text = chance.choice(forms).format(
            a=first.word, b=second.word, c=third.word, g=first.gloss, t=goods[0], u=goods[1],
            r=people[0], s=people[1], p=words("place") or "a small town",
        )  # fmt: skip
        yield text[0].upper() + text[1:]


def about_passages(words: Words) -> Iterator[str]:
    """Tasks with a text to work on, made of definitions and example sentences."""
    chance = words.chance
    told = [(s, text) for group in words.senses.values() for s in group for text in s.examples if len(text) > 20]
    forms = (
        "Summarize the following text in one sentence: {t}", "Rewrite this more formally: {t}",
        "Extract all nouns from this text and list them: {t}", "What is the main idea of this passage? {t}",
        "Translate the following into simple English: {t}", "Continue this text with three more sentences: {t}",
        "Turn the following notes into a paragraph: {t}", "Correct any mistakes in this text: {t}",
        "Write a question that the following text answers: {t}", "Give this text a title: {t}",
        "Read the passage and answer in a complete sentence what it is about.\n\n{t}",
        "Make a JSON object with the keys subject, action and mood from this text: {t}",
        "Classify the sentiment of each sentence: {t}", "Turn this into a dialogue between two people: {t}",
    )  # fmt: skip
    while True:
        if chance.random() < 0.5:
            group = words.senses[chance.choice(sorted(words.senses))]
            parts = [f"{s.word[:1].upper()}{s.word[1:]} is {s.gloss}." for s in chance.sample(group, 3)]
        else:
            parts = [f"{text[:1].upper()}{text[1:]}." for _, text in chance.sample(told, chance.randint(2, 5))]
        yield chance.choice(forms).format(t=" ".join(parts))


@dataclass(frozen=True, slots=True)
class Function:
    name: str
    purpose: str  # first line of its docstring
    source: str


def standard_library(limit: int = 5000) -> list[Function]:
    """Documented functions of the standard library of the Python that runs this."""
    found: list[Function] = []
    root = Path(sysconfig.get_paths()["stdlib"])
    files = [*sorted(root.glob("*.py")), *sorted(root.glob("[a-z]*/*.py"))]
    for path in files:
        if "test" in path.parts[-2] or "packages" in str(path.relative_to(root)):
            continue
        try:
            text = path.read_text(encoding="utf-8")
            nodes = ast.walk(ast.parse(text))
        except (SyntaxError, UnicodeDecodeError, ValueError):
            continue
        for node in nodes:
            if isinstance(node, ast.FunctionDef) and not node.name.startswith("_"):
                purpose = (ast.get_docstring(node) or "").split("\n")[0].strip()
                if 20 < len(purpose) < 120 and purpose.endswith("."):
                    found.append(Function(node.name, purpose, ast.get_source_segment(text, node) or ""))
    return found[:limit]


_VERBS = re.compile(
    r"^(Return|Check|Convert|Compute|Get|Create|Split|Remove|Parse|Find|Add|Set|Read|Write|Compare|Insert|Generate|"
    r"Iterate|Replace|Encode|Decode|Open|Close|Print|Format|Extract|Count|Sort|Delete|List|Determine|Make|Copy|Send)s? "
)


def tasks_of(functions: Iterable[Function]) -> list[str]:
    """ "returns the ..." for every purpose that begins with a plain verb."""
    purposes = {f.purpose.rstrip(".") for f in functions}
    return sorted(
        _VERBS.sub(lambda verb: f"{verb[1].lower()}s ", purpose) for purpose in purposes if _VERBS.match(purpose)
    )


def about_python(functions: Sequence[Function], chance: random.Random) -> Iterator[str]:
    short = [f for f in functions if f.source.count("\n") < 14 and len(f.source) < 420]
    while True:
        f = chance.choice(functions)
        s = chance.choice(short)
        yield chance.choice(
            (
                f"Write a Python function called {f.name}. {f.purpose}",
                f"What does this code do?\n\n{s.source}",
                f'Complete this function:\n\ndef {f.name}(data):\n    """{f.purpose}"""\n',
                f"Find possible problems in this function and suggest a better version:\n\n{s.source}",
                f"Explain how a function `{f.name}` could work. Its documentation says: {f.purpose}",
                f"Write two unit tests for `{f.name}`. {f.purpose}",
            )
        )


def evals_prompts(folder: Path, chance: random.Random) -> list[str]:
    """English prompts of at most 480 characters, at most ``PER_TASK`` a task, in random order."""
    usual = {"the", "a", "of", "is", "what", "to", "in", "and", "for", "you", "how", "are", "that", "with"}
    by_task: dict[str, list[str]] = {}
    for path in sorted(folder.rglob("*.jsonl")):
        task = path.relative_to(folder).parts[0]
        if task in _SKIP_TASKS:
            continue
        for line in islice(path.open(encoding="utf-8"), 20000):
            try:
                text = _user_text(json.loads(line))
            except json.JSONDecodeError:
                continue
            found = re.findall(r"[A-Za-z]+", text)
            english = len(found) >= 7 and sum(word.lower() in usual for word in found) >= 3
            if english and 30 <= len(text) <= 480 and text.isascii():
                by_task.setdefault(task, []).append(text)
    prompts = [text for group in by_task.values() for text in chance.sample(group, min(PER_TASK, len(group)))]
    chance.shuffle(prompts)
    return prompts


def _user_text(row: Any) -> str:
    """The last message of the user (else of the system) of one row."""
    if not isinstance(row, dict):
        return ""
    text = row.get("input", row.get("prompt", row.get("question", "")))
    if isinstance(text, list):
        said: dict[str, str] = {}
        for message in text:
            if isinstance(message, dict):
                said[str(message.get("role"))] = str(message.get("content", ""))
        text = said.get("user", said.get("system", ""))
    return text if isinstance(text, str) else ""


def gym_tasks(count: int, seed: int) -> list[str]:
    """Questions of reasoning-gym's generators, as many of each; those that imitate GSM8K are left out."""
    gym: Any = importlib.import_module("reasoning_gym")
    names = [name for name in sorted(gym.factory.DATASETS) if "gsm" not in name and name != "composite"]
    prompts: list[str] = []
    for name in names:
        try:
            data = gym.create_dataset(name, size=max(1, count // len(names)), seed=seed)
            prompts += [str(data[i]["question"]) for i in range(len(data))]
        except Exception as error:  # a generator whose own requirements are missing
            print(f"reasoning-gym {name}: left out ({error})", file=sys.stderr)
    random.Random(seed).shuffle(prompts)
    return [text for text in prompts if len(text) <= 480 and text.isascii()]


def grams(text: str) -> set[tuple[str, ...]]:
    words = normalize(text).split()
    return {tuple(words[i : i + OVERLAP]) for i in range(max(1, len(words) - OVERLAP + 1))}


def mixed(sources: dict[str, Iterator[str]], chance: random.Random) -> Iterator[str]:
    """From the sources by share; one that is used up drops out."""
    while sources:
        names = sorted(sources)
        name = chance.choices(names, [SHARES[name] for name in names])[0]
        try:
            yield next(sources[name])
        except StopIteration:
            del sources[name]


def templated(words: Callable[[str], str | None], chance: random.Random) -> Iterator[str]:
    categories = sorted(TEMPLATES)
    weights = [CATEGORIES.get(category, 1) for category in categories]
    while True:
        category = chance.choices(categories, weights)[0]
        yield fill(chance.choice(TEMPLATES[category]), chance, words)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--wordnet", type=Path, required=True, help="folder of data.noun and index.noun")
    parser.add_argument("--evals", type=Path, help="registry/data of the evals package")
    parser.add_argument("--reasoning-gym", type=int, default=0, metavar="N", help="that many of its tasks")
    parser.add_argument("--exclude-prompts", type=Path, action="append", default=[])
    parser.add_argument("--num-questions", type=int, default=40000)
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(argv)
    chance = random.Random(args.seed)
    functions = standard_library()
    words = Words(read_wordnet(args.wordnet), tasks_of(functions), chance)
    sources = {
        "template": templated(words, chance),
        "word": about_words(words),
        "essay": essays(words),
        "passage": about_passages(words),
        "python": about_python(functions, chance),
    }
    if args.evals:
        sources["evals"] = iter(evals_prompts(args.evals, chance))
    if args.reasoning_gym:
        sources["reasoning-gym"] = iter(gym_tasks(args.reasoning_gym, args.seed))
    excluded = {gram for text in read_excluded(args.exclude_prompts) for gram in grams(text)}
    dropped, seen = 0, set()
    with args.output.open("w", encoding="utf-8") as file:
        for text in mixed(sources, chance):
            if not excluded.isdisjoint(grams(text)):
                dropped += 1
            elif (key := normalize(text)) not in seen:
                seen.add(key)
                file.write(json.dumps({"turns": [text]}) + "\n")
            if len(seen) >= args.num_questions:
                break
    print(json.dumps({"questions": len(seen), "dropped_as_evaluation": dropped}))


if __name__ == "__main__":
    main()
