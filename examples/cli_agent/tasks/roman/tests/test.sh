#!/bin/sh
# The program is run as one of its own: what it prints counts, and the reward is written when it has ended.
said() { timeout 5 python3 -I /app/roman.py "$1" 2> /dev/null; }
reward=1
while read -r number expected; do [ "$(said "$number" < /dev/null)" = "$expected" ] || { echo "$number"; reward=0; }; done << END
1 I
4 IV
9 IX
40 XL
90 XC
400 CD
888 DCCCLXXXVIII
1994 MCMXCIV
3999 MMMCMXCIX
END
for number in 0 4000; do said "$number" && reward=0; done
echo "$reward" > /logs/verifier/reward.txt
