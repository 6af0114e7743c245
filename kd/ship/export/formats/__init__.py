"""One file for each format that ``kd-export to=`` takes by its name; the first line of each says what it is."""
