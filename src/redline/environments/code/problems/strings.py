"""Problems about texts, and programs that read standard input."""

from __future__ import annotations

from random import Random

from redline.environments.code.problems.family import Family, Function, Stream, numbers, texts, words

TEXT = "string `text` of words with a space between them"


def count_letter(draw: Random) -> Function:
    letter = draw.choice("aeilnrst")
    does = f"returns how often the letter '{letter}' stands in the string `text`"
    return Function("count_letter(text)", does, lambda text: text.count(letter), [("",), *texts(draw)])


def long_words(draw: Random) -> Function:
    k = draw.randint(4, 7)
    does = f"returns a list of the words of the {TEXT} that have at least {k} letters, in their order"
    return Function("long_words(text)", does, lambda text: [word for word in text.split() if len(word) >= k], texts(draw))


def caesar(draw: Random) -> Function:
    k = draw.randint(1, 25)
    does = (
        f"returns the string `text` with each small letter moved {k} places on in the alphabet, from z on to a; the rest stays"
    )
    return Function("caesar(text)", does, lambda text: "".join(_moved(c, k) for c in text), texts(draw))


def replace_vowels(draw: Random) -> Function:
    mark = draw.choice("*#-+_")
    does = f"returns the string `text` with each of the letters a, e, i, o and u replaced by '{mark}'"
    return Function("hide(text)", does, lambda text: "".join(mark if c in "aeiou" else c for c in text), texts(draw))


def reverse_words(draw: Random) -> Function:
    k = draw.randint(5, 7)
    does = f"returns the {TEXT}, with every word of {k} letters or more spelled backwards"
    return Function("turn(text)", does, lambda text: " ".join(w[::-1] if len(w) >= k else w for w in text.split()), texts(draw))


def join_with(draw: Random) -> Function:
    mark = draw.choice(("-", ", ", "/", "::", " + "))
    does = f"returns the words of the {TEXT} in alphabetical order, joined with '{mark}'"
    return Function("joined(text)", does, lambda text: mark.join(sorted(text.split())), texts(draw))


def is_palindrome(draw: Random) -> Function:
    k = draw.randint(1, 3)
    does = (
        f"returns True where the string `text` without its first {k} characters reads the same backwards, and False otherwise"
    )
    inputs = [("x" * k + "level",), ("x" * k + "noon",), ("",), *texts(draw, 3, most=1)]
    return Function("mirrored(text)", does, lambda text: text[k:] == text[k:][::-1], inputs)


def initials(draw: Random) -> Function:
    k = draw.randint(1, 3)
    does = f"returns the first {k} letter{'s' * (k > 1)} of each word of the {TEXT}, in capitals, as a list"
    return Function("heads(text)", does, lambda text: [word[:k].upper() for word in text.split()], texts(draw))


def sum_line(draw: Random) -> Stream:
    k = draw.randint(2, 9)
    return Stream(
        "a line of integers with spaces between them", f"their sum times {k}",
        lambda given: f"{k * sum(map(int, given.split()))}\n",
        [_line(numbers(draw)) for _ in range(5)],
    )  # fmt: skip


def filter_lines(draw: Random) -> Stream:
    k = draw.randint(4, 7)
    return Stream(
        "words, one on each line, until the input ends", f"those of more than {k} letters in capitals, one on each line",
        lambda given: "".join(f"{word.upper()}\n" for word in given.split() if len(word) > k),
        ["".join(f"{word}\n" for word in words(draw, 2, 8)) for _ in range(5)],
    )  # fmt: skip


def table(draw: Random) -> Stream:
    k = draw.randint(2, 12)
    return Stream(
        "an integer n", f"the numbers from 1 to n, each on a line of its own and followed by a space and its product with {k}",
        lambda given: "".join(f"{i} {i * k}\n" for i in range(1, int(given) + 1)),
        [f"{draw.randint(1, 12)}\n" for _ in range(4)],
    )  # fmt: skip


def min_and_max(draw: Random) -> Stream:
    k = draw.randint(1, 50)
    return Stream(
        "a number n and then n lines with an integer on each",
        f"the smallest and the largest of them, each plus {k}, on one line",
        lambda given: _least_and_greatest(given, k), [_column(numbers(draw)) for _ in range(5)],
    )  # fmt: skip


def count_words(draw: Random) -> Stream:
    letter = draw.choice("aeglmrtw")
    return Stream(
        "a line of words", f"how many of them contain the letter '{letter}'",
        lambda given: f"{sum(letter in word for word in given.split())}\n", [" ".join(words(draw)) + "\n" for _ in range(5)],
    )  # fmt: skip


def triangle(draw: Random) -> Stream:
    mark = draw.choice("*#@o+x")
    return Stream(
        "an integer n", f"n lines: the first has one '{mark}', and each of the others one more than the line before it",
        lambda given: "".join(mark * i + "\n" for i in range(1, int(given) + 1)),
        [f"{n}\n" for n in draw.sample(range(1, 12), 4)],
    )  # fmt: skip


def _moved(character: str, k: int) -> str:
    return chr((ord(character) - 97 + k) % 26 + 97) if "a" <= character <= "z" else character


def _line(values: list[int]) -> str:
    return " ".join(map(str, values)) + "\n"


def _column(values: list[int]) -> str:
    return "".join(f"{value}\n" for value in [len(values), *values])


def _least_and_greatest(given: str, k: int) -> str:
    _, *values = map(int, given.split())
    return f"{min(values) + k} {max(values) + k}\n"


FAMILIES: list[Family] = [
    count_letter, long_words, caesar, replace_vowels, reverse_words, join_with, is_palindrome, initials, sum_line, filter_lines,
    table, min_and_max, count_words, triangle,
]  # fmt: skip
