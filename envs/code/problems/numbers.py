"""Problems about numbers."""

from envs.code.problems.problem import Problem


def primes_below(limit: int) -> list[int]:
    """Give the primes below the limit, in order."""
    primes = []
    for number in range(2, limit):
        if all(number % prime for prime in primes if prime * prime <= number):
            primes.append(number)
    return primes


def roman(number: int) -> str:
    """Write a number from 1 to 3999 in Roman numerals."""
    values = [1000, 900, 500, 400, 100, 90, 50, 40, 10, 9, 5, 4, 1]
    signs = ["M", "CM", "D", "CD", "C", "XC", "L", "XL", "X", "IX", "V", "IV", "I"]
    written = ""
    for value, sign in zip(values, signs, strict=True):
        while number >= value:
            written += sign
            number -= value
    return written


def collatz_steps(number: int) -> int:
    """Count the steps to 1, where a step halves an even number, and triples an odd one and adds 1."""
    steps = 0
    while number != 1:
        number = number // 2 if number % 2 == 0 else 3 * number + 1
        steps += 1
    return steps


def change_ways(amount: int, coins: list[int]) -> int:
    """Count the ways to pay an amount with coins of these values, any number of each; their order is of no matter."""
    ways = [1] + [0] * amount
    for coin in coins:
        for part in range(coin, amount + 1):
            ways[part] += ways[part - coin]
    return ways[amount]


def digital_root(number: int) -> int:
    """Add up the decimal digits, again and again, until one digit is left."""
    while number > 9:
        number = sum(int(digit) for digit in str(number))
    return number


def prime_factors(number: int) -> list[list[int]]:
    """Give the prime factors of a number from 1 upwards as [prime, exponent], in order."""
    factors = []
    divisor = 2
    while divisor * divisor <= number:
        exponent = 0
        while number % divisor == 0:
            number //= divisor
            exponent += 1
        if exponent:
            factors.append([divisor, exponent])
        divisor += 1
    if number > 1:
        factors.append([number, 1])
    return factors


def is_leap_year(year: int) -> bool:
    """Tell whether a year of the Gregorian calendar is a leap year."""
    return year % 4 == 0 and (year % 100 != 0 or year % 400 == 0)


def josephus(people: int, step: int) -> int:
    """People 1, 2, ... stand in a circle and every step-th one leaves, from 1 on; give the number of the last."""
    last = 0
    for size in range(2, people + 1):
        last = (last + step) % size
    return last + 1


def square_root(number: int) -> int:
    """Give the largest whole number whose square is not greater than the given one; numbers have up to 60 digits."""
    low, high = 0, number + 1
    while high - low > 1:
        middle = (low + high) // 2
        if middle * middle <= number:
            low = middle
        else:
            high = middle
    return low


def bowling(rolls: list[int]) -> int:
    """Give the score of a complete game of ten-pin bowling by the pins of each roll."""
    score = first = 0
    for _ in range(10):
        if rolls[first] == 10:
            score += 10 + rolls[first + 1] + rolls[first + 2]
            first += 1
        elif rolls[first] + rolls[first + 1] == 10:
            score += 10 + rolls[first + 2]
            first += 2
        else:
            score += rolls[first] + rolls[first + 1]
            first += 2
    return score


PROBLEMS = (
    Problem(
        solution=primes_below,
        bug=("prime * prime <= number", "prime * prime < number"),
        visible=[(3,), (4,)],
        hidden=[(0,), (2,), (10,), (30,), (50,), (122,)],
    ),
    Problem(
        solution=roman,
        bug=("number >= value", "number > value"),
        visible=[(3,), (14,)],
        hidden=[(1,), (4,), (9,), (40,), (1994,), (3999,), (888,)],
    ),
    Problem(
        solution=collatz_steps,
        bug=("steps = 0", "steps = 1"),
        visible=[(1,), (8,)],
        hidden=[(3,), (6,), (7,), (27,), (97,), (1024,)],
    ),
    Problem(
        solution=change_ways,
        bug=("range(coin, amount + 1)", "range(coin, amount)"),
        visible=[(5, [1, 2, 5]), (0, [2])],
        hidden=[(3, [2]), (10, [10]), (100, [1, 5, 10, 25, 50]), (7, []), (4, [1, 2, 3])],
    ),
    Problem(
        solution=digital_root,
        bug=("while number > 9", "if number > 9"),
        visible=[(12,), (7,)],
        hidden=[(0,), (38,), (99,), (987654321,), (199,), (10**18 - 1,)],
    ),
    Problem(
        solution=prime_factors,
        bug=("if number > 1:", "if number > 2:"),
        visible=[(12,), (7,)],
        hidden=[(1,), (2,), (97,), (360,), (1024,), (9973 * 9967,), (2 * 3 * 5 * 7 * 11 * 13,), (6,)],
    ),
    Problem(
        solution=is_leap_year,
        bug=(" or year % 400 == 0", ""),
        visible=[(2024,), (2023,)],
        hidden=[(1900,), (2000,), (2400,), (2100,), (4,), (1,)],
    ),
    Problem(
        solution=josephus,
        bug=("(last + step) % size", "(last + step - 1) % size"),
        visible=[(1, 3), (5, 2)],
        hidden=[(7, 3), (41, 3), (10, 1), (2, 2), (100, 7)],
    ),
    Problem(
        solution=square_root,
        bug=("middle * middle <= number", "middle * middle < number"),
        visible=[(10,), (16,)],
        hidden=[(0,), (1,), (2,), (99,), (100,), (10**40,), (10**40 - 1,), (123456789**2 + 5,)],
    ),
    Problem(
        solution=bowling,
        bug=("rolls[first] + rolls[first + 1] == 10", "rolls[first + 1] == 10"),
        visible=[([0] * 20,), ([1] * 20,)],
        hidden=[
            ([10] * 12,),
            ([5] * 21,),
            ([9, 0] * 10,),
            ([10, 3, 6, *[0] * 16],),
            ([5, 5, 3, *[0] * 17],),
            ([*[0] * 18, 5, 5, 10],),
        ],
    ),
)
