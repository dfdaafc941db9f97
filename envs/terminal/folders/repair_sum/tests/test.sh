#!/bin/sh
cd /testbed && python3 /tests/judge.py
