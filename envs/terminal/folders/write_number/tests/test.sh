#!/bin/sh
[ "$(cat /app/number.txt)" = 37 ] && echo 1 > /logs/verifier/reward.txt || echo 0 > /logs/verifier/reward.txt
