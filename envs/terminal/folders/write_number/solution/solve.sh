#!/bin/sh
echo 37 > number.txt
