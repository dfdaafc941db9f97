import sys


def to_roman(number: int) -> str:
    raise NotImplementedError


if __name__ == "__main__":
    print(to_roman(int(sys.argv[1])))
