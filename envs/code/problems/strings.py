"""Problems about texts."""

from envs.code.problems.problem import Problem


def is_balanced(text: str) -> bool:
    """Tell whether the brackets (), [] and {} of the text are closed in the right order; other characters are free."""
    opening = {")": "(", "]": "[", "}": "{"}
    waiting = []
    for letter in text:
        if letter in "([{":
            waiting.append(letter)
        elif letter in opening and (not waiting or waiting.pop() != opening[letter]):
            return False
    return not waiting


def run_lengths(text: str) -> str:
    """Write each run of equal characters as the character and the length of the run: aab becomes a2b1."""
    runs = []
    for letter in text:
        if runs and runs[-1][0] == letter:
            runs[-1][1] += 1
        else:
            runs.append([letter, 1])
    return "".join(f"{letter}{length}" for letter, length in runs)


def shift_letters(text: str, by: int) -> str:
    """Move each letter a-z and A-Z so many places on in the alphabet, around its end; other characters stay."""
    moved = []
    for letter in text:
        if letter.isascii() and letter.isalpha():
            first = ord("a") if letter.islower() else ord("A")
            moved.append(chr((ord(letter) - first + by) % 26 + first))
        else:
            moved.append(letter)
    return "".join(moved)


def longest_palindrome(text: str) -> str:
    """Give the longest part of the text that reads the same backwards; of several, the first."""
    best = ""
    for start in range(len(text)):
        for end in range(start + 1, len(text) + 1):
            part = text[start:end]
            if part == part[::-1] and len(part) > len(best):
                best = part
    return best


def word_counts(text: str) -> dict[str, int]:
    """Count the words of a text, which white space separates, without regard to case; give them in lower case."""
    counts = {}
    for word in text.lower().split():
        counts[word] = counts.get(word, 0) + 1
    return counts


def edit_distance(first: str, second: str) -> int:
    """Give the fewest insertions, deletions and replacements of characters that make the second text of the first."""
    row = list(range(len(second) + 1))
    for i, a in enumerate(first, 1):
        previous, row[0] = row[0], i
        for j, b in enumerate(second, 1):
            replaced = previous + (a != b)
            previous = row[j]
            row[j] = min(row[j] + 1, row[j - 1] + 1, replaced)
    return row[-1]


def wrap(text: str, width: int) -> list[str]:
    """Break a text of words into lines of at most so many characters, as full as they can be; no word is longer."""
    lines = []
    for word in text.split():
        if lines and len(lines[-1]) + 1 + len(word) <= width:
            lines[-1] += " " + word
        else:
            lines.append(word)
    return lines


def title_number(title: str) -> int:
    """Give the number of a column of a spreadsheet by its title: A is 1, Z is 26, AA is 27."""
    number = 0
    for letter in title:
        number = number * 26 + ord(letter) - ord("A") + 1
    return number


def common_prefix(words: list[str]) -> str:
    """Give the longest beginning that all words share; none for an empty list."""
    if not words:
        return ""
    prefix = words[0]
    for word in words[1:]:
        while not word.startswith(prefix):
            prefix = prefix[:-1]
    return prefix


def group_anagrams(words: list[str]) -> list[list[str]]:
    """Group the words that have the same letters: groups and words in the order in which they come first."""
    groups = {}
    for word in words:
        groups.setdefault("".join(sorted(word)), []).append(word)
    return list(groups.values())


PROBLEMS = (
    Problem(
        solution=is_balanced,
        bug=("return not waiting", "return True"),
        visible=[("(a[b])",), ("(]",)],
        hidden=[("",), ("((",), (")(",), ("{[()]}",), ("{[(])}",), ("x)",), ("f(x) = {y[1]}",)],
    ),
    Problem(
        solution=run_lengths,
        bug=("runs[-1][0] == letter", "letter in runs[-1][0] + text[0]"),
        visible=[("aab",), ("x",)],
        hidden=[("",), ("aaabbbccc",), ("abab",), ("zzzzzzzzzzzz",), ("aAaA",), ("112",)],
    ),
    Problem(
        solution=shift_letters,
        bug=("ord('a') if letter.islower() else ord('A')", "ord('a')"),
        visible=[("abc", 1), ("x-y", 2)],
        hidden=[("xyz", 3), ("XYZ", 3), ("Hello, World!", 13), ("abc", -1), ("", 5), ("aZ", 52), ("é1", 4)],
    ),
    Problem(
        solution=longest_palindrome,
        bug=("len(text) + 1)", "len(text))"),
        visible=[("babad",), ("abc",)],
        hidden=[("",), ("a",), ("noon",), ("cbbd",), ("forgeeksskeegfor",), ("abacdfgdcaba",), ("aaaa",)],
    ),
    Problem(
        solution=word_counts,
        bug=("text.lower().split()", "text.lower().split(' ')"),
        visible=[("a b a",), ("The the",)],
        hidden=[("",), ("  one  two ",), ("x\ty\nx",), ("Aa aA AA",), ("it's it's",)],
    ),
    Problem(
        solution=edit_distance,
        bug=("row[j - 1] + 1", "row[j - 1]"),
        visible=[("cat", "cut"), ("", "")],
        hidden=[("kitten", "sitting"), ("", "abc"), ("abc", ""), ("flaw", "lawn"), ("same", "same"), ("ab", "ba")],
    ),
    Problem(
        solution=wrap,
        bug=("<= width", "< width"),
        visible=[("one two three", 9), ("a", 5)],
        hidden=[("", 5), ("aa bb cc", 5), ("aa bb cc", 2), ("to be or not to be", 6), ("  x   y  ", 3)],
    ),
    Problem(
        solution=title_number,
        bug=("number * 26", "number * 25"),
        visible=[("A",), ("Z",)],
        hidden=[("AA",), ("AZ",), ("ZZ",), ("AAA",), ("XFD",)],
    ),
    Problem(
        solution=common_prefix,
        bug=("word.startswith(prefix)", "prefix in word"),
        visible=[(["flower", "flow"],), (["a", "b"],)],
        hidden=[([],), (["same"],), (["ab", "xab"],), (["interview", "internet", "interval"],), (["", "a"],)],
    ),
    Problem(
        solution=group_anagrams,
        bug=("''.join(sorted(word))", "''.join(sorted(set(word)))"),
        visible=[(["eat", "tea", "tan"],), (["x"],)],
        hidden=[([],), (["ab", "ba", "abb"],), (["", ""],), (["aab", "abb", "baa"],), (["no", "on", "is"],)],
    ),
)
