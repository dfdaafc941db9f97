#!/bin/sh
if printf 'Ada\nLeo\nMia\n' | cmp - /app/names.txt; then reward=1; else reward=0; fi
echo "{\"reward\": $reward}" > /logs/verifier/reward.json
