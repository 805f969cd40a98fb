"""Training questions: templated ones from the word lists below, and the rules for the target's own.

Contract: every question that reaches training passes ``QuestionFilter.admit`` once. It refuses repeats, fragments and
any question equal to one in the files of excluded prompts (evaluation sets), compared without case, punctuation and
spacing. ``TemplatedQuestions`` is an endless, seeded stream; the target's own questions are sampled by ``generate``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Iterable, Iterator
from pathlib import Path

from outrider.errors import ConfigError

TOPICS = (
    "climate change|renewable energy|the history of chess|coral reefs|the water cycle|black holes|"
    "photosynthesis|the immune system|supply and demand|machine learning|the Roman Empire|jazz music|"
    "ocean tides|volcanoes|vaccines|public libraries|electric cars|sleep|urban gardening|coffee|"
    "the printing press|whales|bridges|inflation|poetry|yoga|recycling|quantum mechanics|the human heart|"
    "antibiotics|desert animals|the moon|time management|honey bees|glaciers|remote work|online privacy|"
    "bread baking|mountain climbing|the stock market|small businesses|public speaking|tea|photography|"
    "bicycles|earthquakes|plastic pollution|space telescopes|mental health|evolution|the Silk Road|robots|"
    "nutrition|philosophy|classical architecture|wildfires|music theory|trade unions|tropical rainforests|"
    "insulin|gravity|lighthouses|satellites|social media|city parks|migration of birds|"
    "the Industrial Revolution|artificial intelligence|deep sea fish|teamwork|storytelling|solar panels|"
    "dinosaurs|ancient Egypt|the brain|magnetism|batteries|friendship"
)
PLACES = (
    "Lisbon|Kyoto|a small fishing village|the Scottish Highlands|Mexico City|a space station|"
    "a mountain cabin|New Orleans|the Sahara|a busy airport|Reykjavik|an old library|Nairobi|a farm in Ohio|"
    "Venice|Vancouver|an island in Greece|a night market|the Amazon|Istanbul|a lighthouse|Buenos Aires|"
    "a quiet suburb|Singapore|a forest in Norway"
)
PEOPLE = (
    "a retired teacher|a young scientist|a tired nurse|a clever fox|a lonely robot|a street musician|"
    "two sisters|a lost astronaut|a baker|a detective|a shy painter|an old sailor|a night watchman|"
    "a chess player|a librarian|a farmer|a taxi driver|a gardener|a curious child|a clockmaker|a ghost|"
    "a bus driver|a mountain guide|an inventor"
)
ROLES = (
    "a travel guide|a doctor|a chef|a history professor|a career coach|a pirate|a physics teacher|a lawyer|"
    "a poet|a fitness trainer|a medieval knight|a sports commentator|a financial adviser|an English tutor|"
    "a film critic|a gardener|a mathematician|a ship's captain|an alien visiting Earth|a detective|"
    "a software engineer|a philosopher|a news reporter"
)
THINGS = (
    "a smart watch|a reusable bottle|a children's book|a laptop stand|an online course|a coffee shop|"
    "a hiking boot|a language app|a vegetarian restaurant|a garden tool|a board game|a folding bike|"
    "a desk lamp|a cooking class|a podcast|a raincoat|a music festival|a charity run|a phone camera|"
    "a backpack|a bookshop|a meal plan|a weather app"
)
TASKS = (
    "reverses a string|finds the largest number in a list|checks whether a word is a palindrome|"
    "sorts a list of dictionaries by a key|counts the words in a text|computes the n-th Fibonacci number|"
    "merges two sorted lists|removes duplicates from a list|tests whether a number is prime|reads a CSV file|"
    "finds the longest word in a sentence|computes the factorial of a number|converts Celsius to Fahrenheit|"
    "flattens a nested list|implements binary search|counts vowels|rotates a matrix|"
    "validates an email address|finds two numbers that add up to a target|implements a stack|"
    "generates a random password|computes the average of a list|transposes a matrix|"
    "counts the frequency of each character"
)
LANGUAGES = "Python|Python|Python|JavaScript|Java|C++|Go|SQL|Ruby|Rust"
NAMES = (
    "Anna|Ben|Carla|Dmitri|Elena|Farid|Grace|Hugo|Ines|Jonas|Keiko|Liam|Maria|Nadia|Omar|Priya|Quentin|Rosa|Sam|Tariq"
)
ITEMS = "apples|pencils|books|marbles|cookies|stickers|oranges|tickets|coins|flowers|eggs|shirts|bottles|cards"
MOODS = "funny|sad|mysterious|hopeful|short|dramatic|gentle|surprising|formal|casual|persuasive|simple"
SUBJECTS = (
    "osmosis|an enzyme|Newton's third law|a chemical bond|a vector space|a derivative|an atom|"
    "DNA replication|the greenhouse effect|a transistor|entropy|plate tectonics|a hash table|recursion|"
    "natural selection|the periodic table|an electric circuit|refraction of light|a galaxy|a neural network|"
    "standard deviation|the Doppler effect|a black hole|an operating system|radioactive decay|photosynthesis|"
    "a prime number|acceleration|an ecosystem|probability"
)
MOVEMENTS = (
    "the French Revolution|stoicism|the Renaissance|feminism|the Cold War|impressionism|utilitarianism|"
    "Buddhism|the civil rights movement|romanticism|the Enlightenment|existentialism|globalization|"
    "the Great Depression|democracy|jazz|colonialism|the Magna Carta|surrealism|Shakespeare's tragedies|"
    "Greek mythology|the Black Death|the fall of Rome"
)

_LISTS = {
    name: text.split("|")
    for name, text in {
        "topic": TOPICS, "place": PLACES, "person": PEOPLE, "role": ROLES, "thing": THINGS, "task": TASKS,
        "mood": MOODS, "language": LANGUAGES, "name": NAMES, "item": ITEMS, "subject": SUBJECTS, "movement": MOVEMENTS,
    }.items()
}  # fmt: skip

TEMPLATES: dict[str, tuple[str, ...]] = {
    "writing": (
        "Write a {mood} story about {person} in {place}.",
        "Write a short essay about {topic}.",
        "Compose a {mood} poem about {topic}.",
        "Draft a professional email to {name} about a meeting on {topic}. Keep it polite and brief.",
        "Write a product description for {thing} that would make people want to buy it.",
        "Write a blog post introduction about {topic} for readers who know nothing about it.",
        "Help me write a {mood} letter to my neighbour {name} about {topic}.",
        "Describe {place} early in the morning. Use vivid detail.",
        "Write an outline for an article that compares {topic} and {topic}.",
        "Write a {mood} opening paragraph for a novel where {person} arrives in {place}.",
        "Rewrite this sentence so that it sounds more {mood}: '{name} went to {place} to learn about {topic}.'",
    ),
    "roleplay": (
        "Pretend you are {role}. Explain {topic} to a visitor.",
        "You are {role}. {name} asks you for advice about {topic}. What do you say?",
        "Imagine you are {role} living in {place}. Describe your day.",
        "Act as {role} and answer my questions. First question: what should everyone know about {topic}?",
        "Speak as {role} would and convince me to buy {thing}.",
        "I want you to play {role}. Start by introducing yourself and telling me what you think of {place}.",
    ),
    "reasoning": (
        "What would happen if there were no {topic}? Think step by step.",
        "{name} is taller than {name} but shorter than {name}. Who might be the tallest? Explain your reasoning.",
        "Which is more useful in {place}: {thing} or {thing}? Give reasons for your choice.",
        "Is it a good idea to spend more public money on {topic}? Give arguments for and against.",
        "{name} has to choose between studying {topic} and starting {thing}. How should the choice be made?",
        "If all {item} are heavy and some heavy things are red, are all {item} red? Explain.",
        "What are the three biggest problems with {topic}, and how could each be solved?",
    ),
    "maths": (
        "{name} has {number} {item} and gives {small} of them to {name}. How many are left?",
        "A shop sells {item} for {small} dollars each. How much do {number} {item} cost with a discount of 10%?",
        "Solve for x: {small}x + {number} = {big}.",
        "What is {number} times {small}? Show your work.",
        "A train travels {big} miles in {small} hours. What is its average speed?",
        "A rectangle is {number} cm long and {small} cm wide. Find its area and its perimeter.",
        "{name} reads {small} pages a day. How many days does a book of {big} pages take?",
        "What is the probability of drawing a red ball from a bag with {small} red and {number} blue balls?",
        "{name} buys {small} {item} every week. How many {item} is that in a year? Explain each step.",
        "Find the average of {number}, {small} and {big}.",
    ),
    "coding": (
        "Write a {language} function that {task}.",
        "How do I write a {language} program that {task}? Explain the code.",
        "Explain what recursion means in {language} with an example.",
        "Write a {language} class for {thing} with two methods.",
        "What is the difference between a list and a dictionary in {language}?",
        "Here is a task: write code in {language} that {task}. Add comments and an example of its use.",
        "How can I make a {language} program that {task} faster?",
        "Write unit tests for a {language} function that {task}.",
    ),
    "extraction": (
        "List the names in this text: '{name} and {name} met {name} in {place} to talk about {topic}.'",
        "Summarize the following in one sentence: {name}, {role} from {place}, spent {small} years studying {topic}. "
        "The work was slow, but in the end it changed how people think about {topic}.",
        "Turn this into a table: {name} bought {small} {item}, {name} bought {number} {item}.",
        "What is the sentiment of this review? 'I bought {thing} last week and it broke after {small} days.'",
        "Give me a bullet list of five facts about {topic}.",
        "Extract the numbers from this text: '{name} sold {number} {item} on Monday and {big} on Friday.'",
        "Classify these words as animals, places or objects: fox, {place}, lamp, whale, {thing}.",
    ),
    "stem": (
        "Explain {subject} in simple terms.",
        "What is {subject}, and why does it matter?",
        "How does {subject} work? Give an everyday example.",
        "What is the difference between {subject} and {subject}?",
        "Describe an experiment that shows {subject}.",
        "Explain {subject} to a ten year old.",
        "What are the main causes and effects of {topic}?",
        "Give me a short quiz about {subject} with answers.",
    ),
    "humanities": (
        "What were the main causes of {movement}?",
        "How did {movement} change everyday life?",
        "Compare {movement} with {movement}.",
        "Give a short overview of {movement} for a school class.",
        "Who were the important people in {movement}?",
        "Why is {movement} still discussed today?",
        "Suggest a lesson plan about {movement} that takes one hour.",
        "What can {movement} teach us about {topic}?",
    ),
    "advice": (
        "Give me {small} tips about {topic}.",
        "How can I learn more about {topic}?",
        "Plan a weekend in {place} for a family.",
        "What are the benefits and the risks of {topic}?",
        "Can you recommend a healthy dinner that is quick to make?",
        "How do I start {thing} with little money?",
        "Tell me about {place}.",
        "Hi! I am {name}. Can you help me understand {topic}?",
        "I feel nervous about {topic}. What should I do?",
    ),
}
_FIELD = re.compile(r"\{(\w+)\}")


class TemplatedQuestions(Iterator[str]):
    """Endless and seeded: a category, a template of it, a word for every field (two fields never get the same)."""

    def __init__(self, *, seed: int) -> None:
        self._random = random.Random(seed)

    def __next__(self) -> str:
        used: set[str] = set()
        template = self._random.choice(TEMPLATES[self._random.choice(sorted(TEMPLATES))])
        text = _FIELD.sub(lambda field: self._word(field[1], used), template)
        return text[0].upper() + text[1:]

    def _word(self, field: str, used: set[str]) -> str:
        if field in ("small", "number", "big"):
            low, high = {"small": (2, 12), "number": (13, 90), "big": (100, 900)}[field]
            return str(self._random.randint(low, high))
        word = self._random.choice([word for word in _LISTS[field] if word not in used])
        used.add(word)
        return word


class QuestionFilter:
    """Admits a question once; never an excluded one, never a fragment."""

    def __init__(self, excluded: Iterable[str]) -> None:
        self._excluded = {normalize(text) for text in excluded}
        self._seen: set[str] = set()
        self.refused = {"excluded": 0, "repeated": 0, "fragment": 0}

    def admit(self, question: str) -> bool:
        """True once per distinct question."""
        key = normalize(question)
        if key in self._excluded:
            reason = "excluded"
        elif key in self._seen:
            reason = "repeated"
        elif len(key) < 8 or " " not in key or "\ufffd" in question:
            reason = "fragment"
        else:
            self._seen.add(key)
            return True
        self.refused[reason] += 1
        return False


def normalize(text: str) -> str:
    """Lower case, words only, single spaces."""
    return " ".join(re.findall(r"\w+", text.lower()))


def read_excluded(paths: Iterable[Path]) -> list[str]:
    """Questions of evaluation files: JSON lines with ``turns`` (list), ``prompt`` or ``question``, else plain lines."""
    questions: list[str] = []
    for path in paths:
        try:
            lines = path.read_text().splitlines()
        except OSError as error:
            raise ConfigError(f"exclude-prompts: {path} cannot be read ({error.strerror})") from error
        for line in filter(str.strip, lines):
            questions += questions_of(line)
    return questions


def questions_of(line: str) -> list[str]:
    """The turns of one line of such a file."""
    try:
        row = json.loads(line)
    except json.JSONDecodeError:
        return [line]
    if not isinstance(row, dict):
        return [str(row)]
    turns = row.get("turns", [row[key] for key in ("prompt", "question") if key in row])
    return [str(turn) for turn in turns]
