#!/bin/sh
sed -i "s/a - b/a + b/" sums.py
