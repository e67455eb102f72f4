module millstream.dev/tools/pause

go 1.24.0
