# pyright: basic, reportMissingImports=false

import unittest

from sums import add, double


class Sums(unittest.TestCase):
    def test_add(self) -> None:
        self.assertEqual(add(2, 3), 5)

    def test_double(self) -> None:
        self.assertEqual(double(4), 8)
