"""Training questions: templated ones from the word lists below, and the rules for the target's own.

Contract: every question that reaches training passes ``QuestionFilter.admit`` once. It refuses repeats, fragments and
any question equal to one in the files of excluded prompts (evaluation sets), compared without case, punctuation and
spacing. ``TemplatedQuestions`` is an endless, seeded stream; the target's own questions are sampled by ``generate``.
"""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable, Iterable, Iterator
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
        "Write a detailed travel article about a week in {place}, covering food, people and the sights that "
        "should not be missed.",
        "Write a {mood} review of {thing} from the point of view of {person}. Mention at least two strengths "
        "and one weakness.",
        "Create an announcement for a community event about {topic}. Include the date, the place and why "
        "people should come.",
        "Imagine you write a column for a newspaper. Discuss whether {topic} deserves more attention, and "
        "end with a clear opinion.",
        "Write a speech of two minutes in which {name} thanks colleagues for their work on {topic}.",
        "Describe a meeting between {person} and {person} in {place}, using all five senses in the first paragraph.",
        "Write a persuasive email to convince {name}, who is sceptical, to support our project on {topic}. "
        "Keep the tone friendly and the message short.",
        'Edit the following paragraph and correct its mistakes: "{name} go to {place} last year and have saw '
        'many thing about {topic}. It were very interest."',
        "Draft a cover letter for {role} who applies to a company that sells {thing}.",
        "Write the first scene of a play in which {person} and {person} argue about {topic}.",
        "Come up with five slogans for {thing} and explain which one you like best.",
        "Write a short biography of {name}, an imaginary pioneer of {topic}, with three turning points.",
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
        "Please take the role of {role}. A visitor wants to know how {topic} changes the way we live. Stay "
        "in character in every answer.",
        "You are {role} at a dinner party in {place}. Someone claims that {topic} is overrated. Respond in "
        "two paragraphs.",
        "Picture yourself as {role} who has to give a talk to children about {topic}. What would you tell "
        "them, and which example would you use?",
        "Now you are a teacher who explains {subject} with the help of a story. Begin the lesson.",
        "Be my interviewer for a job as {role}. Ask me three questions, one after the other, and comment on "
        "good answers.",
        "Assume the role of {person} and write a diary entry about your first day in {place}.",
        "Pretend you are {role}. Explain {topic} to a visitor.",
        "You are {role}. {name} asks you for advice about {topic}. What do you say?",
        "Imagine you are {role} living in {place}. Describe your day.",
        "Act as {role} and answer my questions. First question: what should everyone know about {topic}?",
        "Speak as {role} would and convince me to buy {thing}.",
        "I want you to play {role}. Start by introducing yourself and telling me what you think of {place}.",
    ),
    "reasoning": (
        "A group of {small} friends sits around a table. {name} sits next to {name}, and {name} sits "
        "opposite {name}. What can we say about who sits where?",
        "{name} says that every {topic} expert drinks tea. {name} drinks tea. Does it follow that {name} is "
        "such an expert? Explain why or why not.",
        "You overtake the person in third place in a race. In which place are you now, and why do people "
        "often get this wrong?",
        "One of these does not belong with the others: {item}, {item}, {item}, whales. Which one is it and why?",
        "{name} walks north for {small} minutes, turns right and walks on for {small} minutes. In which "
        "direction is the starting point? Explain step by step.",
        "Suppose it takes {small} machines {small} minutes to make {small} parts. How long would {number} "
        "machines need for {number} parts?",
        "Before a decision about {topic}, a town asks for advice. Which facts should it collect first, and "
        "how should it weigh them?",
        "What would happen if there were no {topic}? Think step by step.",
        "{name} is taller than {name} but shorter than {name}. Who might be the tallest? Explain your reasoning.",
        "Which is more useful in {place}: {thing} or {thing}? Give reasons for your choice.",
        "Is it a good idea to spend more public money on {topic}? Give arguments for and against.",
        "{name} has to choose between studying {topic} and starting {thing}. How should the choice be made?",
        "If all {item} are heavy and some heavy things are red, are all {item} red? Explain.",
        "What are the three biggest problems with {topic}, and how could each be solved?",
    ),
    "maths": (
        "The price of {thing} rises by {small}% and later falls by {small}%. Is it back at the start? Show "
        "the calculation.",
        "In a class of {number} students, {small} play chess and {small} play tennis, and {small} do both. "
        "How many do neither?",
        "The sides of a triangle are {small}, {small} and {small} cm long. Can such a triangle exist, and "
        "what would its perimeter be?",
        "If f(x) = {small}x^2 - {small}x + {small}, what is the value of f(2)? Explain each step.",
        "A tank holds {big} litres. One pipe fills it in {small} hours and another empties it in {number} "
        "hours. How long until it is full with both open?",
        "How many whole numbers between {small} and {big} are divisible by {small}? Describe how you count them.",
        "Two dice are rolled. What is the probability that the total is at least {small}?",
        "{name} invests {big} dollars, spends a third of it on {item} and half of the rest on {thing}. How "
        "much money is left?",
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
        "Write a {language} program that reads a text file line by line and {task}. Handle the case that the "
        "file does not exist.",
        "Implement in {language} a function that {task}, first in the simplest way and then with better "
        "running time. Compare the two.",
        "My {language} code is supposed to be a function that {task}, but it crashes on empty input. What "
        "are likely reasons and how do I fix it?",
        "Write a simple web page with HTML and a bit of JavaScript that shows a random fact about {topic} "
        "when a button is clicked.",
        "Given an array of integers, write a {language} function that returns the length of the longest "
        "increasing run. Explain its complexity.",
        "Design a small database schema for {thing} and write an SQL query that lists the ten most recent orders.",
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
        'Read the following reviews and rate each from 1 to 5: "I love {thing}." "{name} returned it after '
        '{small} days." "It is fine, but too expensive." Answer as a list.',
        'From this paragraph, list every person and every place: "In {small} weeks {name} travelled from '
        '{place} to {place}, where {name} and {name} were waiting with {item}."',
        'Given these lines, write a JSON object with the fields name, age and city: "{name} is {number} '
        'years old and lives in {place}."',
        'Name the main topic, the mood and the intended reader of this text: "Few things have changed our '
        'lives as much as {topic}. And yet we hardly talk about it."',
        "A shop sold {number} {item} in January, {big} in February and {small} in March. Which month was "
        "best, and what was the total? Answer in one line.",
        "Group these words by meaning and name each group: {item}, {place}, {item}, {topic}, {place}, {topic}.",
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
        "Describe how {subject} was discovered, which experiment supports it and what is still unknown.",
        "In the field of science, what role does {subject} play, and how is it connected to {subject}? Give "
        "a short explanation and one application.",
        "Which measurements would you take to find out whether {topic} affects {topic}? Describe the method "
        "and possible sources of error.",
        "What are the stages of {subject}? Explain what happens in each and why the order matters.",
        "An engineer must build a bridge in {place}. Which properties of the ground, the weather and the "
        "materials have to be known first?",
        "Discuss the advantages and the disadvantages of {topic} from a scientific point of view, with examples.",
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
        "Provide insights into how {movement} influenced economics and art. Use at least two examples.",
        "Describe three causes and three consequences of {movement}. Which of them do historians argue about?",
        "Write a dialogue between a supporter and a critic of {movement} in which both make their best argument.",
        "How do the ideas behind {movement} differ from those behind {movement}? Start with a short "
        "definition of each.",
        "Explain to a visitor of a museum in {place} why an exhibition on {movement} is worth an hour of their time.",
        "Discuss how laws about {topic} have changed over the last century and what that says about society.",
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
        return fill(self._random.choice(TEMPLATES[self._random.choice(sorted(TEMPLATES))]), self._random)


def fill(template: str, chance: random.Random, words: Callable[[str], str | None] = lambda _: None) -> str:
    """The template with a word for every field: ``words(field)``, or one of the lists here where that gives None."""
    used: set[str] = set()

    def word(field: str) -> str:
        if field in ("small", "number", "big"):
            low, high = {"small": (2, 12), "number": (13, 90), "big": (100, 900)}[field]
            return str(chance.randint(low, high))
        found = words(field)
        if found is None or found in used:
            found = chance.choice([word for word in _LISTS[field] if word not in used])
        used.add(found)
        return found

    text = _FIELD.sub(lambda field: word(field[1]), template)
    return text[0].upper() + text[1:]


class FileQuestions(Iterator[str]):
    """The first questions of the files' lines in random order, then templated ones."""

    def __init__(self, paths: Iterable[Path], *, seed: int) -> None:
        questions = [question for path in paths for question in first_turns(path, option="questions")]
        random.Random(seed).shuffle(questions)
        self._questions = iter(questions)
        self._templated = TemplatedQuestions(seed=seed)

    def __next__(self) -> str:
        question = next(self._questions, None)
        return next(self._templated) if question is None else question


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
    return [question for path in paths for line in _lines(path, "exclude-prompts") for question in questions_of(line)]


def first_turns(path: Path, *, option: str) -> list[str]:
    """The first question of every line of a file of questions; ``option`` is whose file it is, for errors."""
    first: list[str] = []
    for number, line in enumerate(_lines(path, option), start=1):
        questions = questions_of(line)
        if not questions:
            raise ConfigError(f"{option}: question {number} of {path} has no turns, prompt or question: {line[:80]}")
        first.append(questions[0])
    return first


def _lines(path: Path, option: str) -> list[str]:
    try:
        return [line for line in path.read_text(encoding="utf-8").splitlines() if line.strip()]
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise ConfigError(f"{option}: {path} cannot be read ({reason})") from error


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
