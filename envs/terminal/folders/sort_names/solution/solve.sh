#!/bin/sh
sort -o names.txt names.txt
