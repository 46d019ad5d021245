#!/usr/bin/env python3
"""Checks that objects of a library which are meant to be pure neither wait, nor ask the time, nor start a thread.

    pure_objects.py LIBRARY [OBJECT ...]

LIBRARY is a static library, OBJECT the name of a source file in it; without one, all of its objects are checked. Pure
code can be driven by any clock, since all that happens to it is said by its caller. Looked at are the symbols that an
object needs from elsewhere (nm), so what headers bring in counts too.
"""
import re
import subprocess
import sys

IMPURE = re.compile(r"std::chrono::|clock_gettime|nanosleep|pthread_(create|cond|mutex_(timed)?lock)|std::thread|"
                    r"condition_variable|std::future|std::this_thread|zg::(HostStream|Stream|Event|io|log)::")


def needed(library):
    """By object: the symbols that it needs, demangled."""
    text = subprocess.run(["nm", "-C", "-u", library], check=True, capture_output=True, text=True).stdout
    objects, current = {}, None
    for line in text.splitlines():
        if line.endswith(".o:"):
            current = objects.setdefault(line[:-len(".o:")], [])
        elif current is not None and line.strip():
            current.append(line.split(maxsplit=1)[1])
    return objects


def main():
    library, wanted = sys.argv[1], sys.argv[2:]
    objects = needed(library)
    missing = [name for name in wanted if name not in objects]
    if missing or not objects:
        sys.exit(f"{library} has no object {', '.join(missing) or 'at all'}")
    found = 0
    for name in wanted or sorted(objects):
        for symbol in objects[name]:
            if IMPURE.search(symbol):
                print(f"{name} needs {symbol}")
                found += 1
    print(f"{len(wanted or objects)} objects, {found} mistakes")
    sys.exit(found > 0)


main()
