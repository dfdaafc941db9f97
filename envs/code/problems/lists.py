"""Problems about lists."""

from envs.code.problems.problem import Problem


def running_maximum(numbers: list[int]) -> list[int]:
    """Give, for each place of the list, the largest number up to and including that place."""
    maxima = []
    for number in numbers:
        maxima.append(max(number, maxima[-1]) if maxima else number)
    return maxima


def rotate(items: list[int], by: int) -> list[int]:
    """Rotate the list to the right by so many places; a negative number rotates to the left."""
    if not items:
        return []
    shift = by % len(items)
    return items[len(items) - shift :] + items[: len(items) - shift]


def merge_intervals(intervals: list[list[int]]) -> list[list[int]]:
    """Merge intervals [start, end] that overlap or touch; give them in the order of their starts."""
    merged = []
    for start, end in sorted(intervals):
        if merged and start <= merged[-1][1]:
            merged[-1][1] = max(merged[-1][1], end)
        else:
            merged.append([start, end])
    return merged


def longest_rise(numbers: list[int]) -> int:
    """Give the length of the longest run of neighbours in which each number is greater than the one before."""
    longest = length = 0
    previous = None
    for number in numbers:
        length = length + 1 if previous is not None and number > previous else 1
        longest = max(longest, length)
        previous = number
    return longest


def best_sum(numbers: list[int]) -> int:
    """Give the largest sum of one or more neighbours. The list is not empty; all numbers may be negative."""
    best = ending_here = numbers[0]
    for number in numbers[1:]:
        ending_here = max(number, ending_here + number)
        best = max(best, ending_here)
    return best


def pairs_with_sum(numbers: list[int], total: int) -> int:
    """Count the pairs of different places in the list whose numbers add up to the total."""
    seen = {}
    count = 0
    for number in numbers:
        count += seen.get(total - number, 0)
        seen[number] = seen.get(number, 0) + 1
    return count


def spiral(rows: list[list[int]]) -> list[int]:
    """Read a rectangle of numbers in a spiral: from the upper left corner, clockwise and inwards."""
    read = []
    while rows:
        read.extend(rows[0])
        rows = [list(column) for column in zip(*rows[1:], strict=True)][::-1]
    return read


def majority(items: list[int]) -> int | None:
    """Give the item that makes up more than half of the list, None when there is none."""
    for item in set(items):
        if 2 * items.count(item) > len(items):
            return item
    return None


def trapped_water(heights: list[int]) -> int:
    """Walls of width 1 stand side by side; give how much rain water stays between them."""
    water = 0
    for place, height in enumerate(heights):
        level = min(max(heights[: place + 1]), max(heights[place:]))
        water += level - height
    return water


def next_greater(numbers: list[int]) -> list[int]:
    """Give, for each number, the first greater one to its right, -1 where there is none."""
    greater = [-1] * len(numbers)
    waiting = []
    for place, number in enumerate(numbers):
        while waiting and numbers[waiting[-1]] < number:
            greater[waiting.pop()] = number
        waiting.append(place)
    return greater


PROBLEMS = (
    Problem(
        solution=running_maximum,
        bug=("max(number, maxima[-1])", "max(number, maxima[0])"),
        visible=[([1, 3, 2],), ([],)],
        hidden=[([5],), ([3, 1, 4, 1, 5, 2],), ([-5, -7, -2, -3],), ([1, 5, 2, 3],), ([2, 2, 2],), ([9, 8, 7],)],
    ),
    Problem(
        solution=rotate,
        bug=("by % len(items)", "min(by, len(items))"),
        visible=[([1, 2, 3, 4], 1), ([1, 2, 3], 0)],
        hidden=[([], 3), ([1, 2, 3, 4], -1), ([1, 2, 3], 7), ([5], 4), ([1, 2, 3, 4, 5], 5), ([1, 2, 3], -8)],
    ),
    Problem(
        solution=merge_intervals,
        bug=("max(merged[-1][1], end)", "end"),
        visible=[([[1, 3], [2, 5], [8, 9]],), ([],)],
        hidden=[
            ([[1, 9], [2, 3]],),
            ([[5, 6], [1, 5]],),
            ([[1, 2], [4, 5]],),
            ([[1, 4], [0, 0]],),
            ([[3, 3], [3, 3]],),
        ],
    ),
    Problem(
        solution=longest_rise,
        bug=("number > previous", "number >= previous"),
        visible=[([1, 2, 3, 1],), ([3, 2, 1],)],
        hidden=[([],), ([7],), ([1, 1, 2, 2],), ([5, 1, 2, 3, 4, 0, 1],), ([-3, -2, -2, -1, 0, 1],)],
    ),
    Problem(
        solution=best_sum,
        bug=("best = ending_here = numbers[0]", "best = ending_here = 0"),
        visible=[([1, -2, 3, 4],), ([2, 3],)],
        hidden=[([-5],), ([-3, -1, -2],), ([4, -1, 2, 1, -5],), ([0, 0],), ([-2, 1, -3, 4, -1, 2, 1, -5, 4],)],
    ),
    Problem(
        solution=pairs_with_sum,
        bug=("seen.get(number, 0) + 1", "1"),
        visible=[([1, 2, 3], 4), ([1, 1], 3)],
        hidden=[([2, 2, 2], 4), ([], 0), ([5], 10), ([0, 0, 0, 0], 0), ([-1, 1, -1, 1], 0), ([1, 5, 3, 3, 3], 6)],
    ),
    Problem(
        solution=spiral,
        bug=("[::-1]", ""),
        visible=[([[1, 2], [3, 4]],), ([[1]],)],
        hidden=[([],), ([[1, 2, 3], [4, 5, 6], [7, 8, 9]],), ([[1], [2], [3]],), ([[1, 2, 3, 4], [5, 6, 7, 8]],)],
    ),
    Problem(
        solution=majority,
        bug=("> len(items)", ">= len(items)"),
        visible=[([3, 3, 2],), ([1, 2, 3],)],
        hidden=[([],), ([1, 1, 2, 2],), ([5],), ([1, 2, 1, 2, 1],), ([0, 0, 1, 0, 1, 2, 3],), ([7, 7, 8, 9],)],
    ),
    Problem(
        solution=trapped_water,
        bug=("min(max(heights[:place + 1]), max(heights[place:]))", "max(heights)"),
        visible=[([2, 0, 2],), ([1, 1],)],
        hidden=[([],), ([0, 1, 0, 2, 1, 0, 1, 3, 2, 1, 2, 1],), ([4, 2, 0, 3, 2, 5],), ([1, 2, 3],), ([3, 0, 1],)],
    ),
    Problem(
        solution=next_greater,
        bug=("numbers[waiting[-1]] < number", "numbers[waiting[-1]] <= number"),
        visible=[([1, 3, 2],), ([3, 2, 1],)],
        hidden=[([],), ([2, 2, 3],), ([5, 1, 1, 2, 6],), ([1, 1, 1],), ([4, 5, 2, 25, 7, 8],)],
    ),
)
