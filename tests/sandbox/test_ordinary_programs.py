# ruff: noqa: E501  programs in one line each
"""Programs as models write them: their verdicts do not depend on the backend."""

import pytest

from sandboxes import BACKENDS, graded, sandbox_or_skip

# name -> program, and what it prints
PROGRAMS = {
    "asyncio": (
        "import asyncio\nasync def f(i):\n    await asyncio.sleep(0.01)\n    return i * i\n"
        "async def main():\n    print(sum(await asyncio.gather(*map(f, range(50)))))\nasyncio.run(main())",
        "40425",
    ),
    "asyncio queue": (
        "import asyncio\nasync def main():\n    q = asyncio.Queue()\n"
        "    async def put():\n        for i in range(5):\n            await q.put(i)\n"
        "    t = asyncio.create_task(put())\n    print([await q.get() for _ in range(5)])\n    await t\nasyncio.run(main())",
        "[0, 1, 2, 3, 4]",
    ),
    "asyncio to_thread": ("import asyncio\nprint(asyncio.run(asyncio.to_thread(pow, 2, 10)))", "1024"),
    "asyncio subprocess": (
        "import asyncio, sys\nasync def main():\n    p = await asyncio.create_subprocess_exec(sys.executable, '-S', '-c',"
        " 'print(input()[::-1])', stdin=-1, stdout=-1)\n    print((await p.communicate(b'abc\\n'))[0].decode().strip())\n"
        "asyncio.run(main())",
        "cba",
    ),
    "threads": (
        "import threading\nfound, lock = [], threading.Lock()\ndef work(i):\n    with lock:\n        found.append(i)\n"
        "threads = [threading.Thread(target=work, args=(i,)) for i in range(20)]\n"
        "[t.start() for t in threads]\n[t.join() for t in threads]\nprint(sorted(found) == list(range(20)))",
        "True",
    ),
    "thread pool": (
        "from concurrent.futures import ThreadPoolExecutor\nwith ThreadPoolExecutor(8) as p:\n"
        "    print(sum(p.map(lambda i: i * i, range(100))))",
        "328350",
    ),
    "timer": ("import threading\nt = threading.Timer(0.05, print, ['late'])\nt.start()\nt.join()", "late"),
    "tempfile": (
        "import tempfile\nwith tempfile.NamedTemporaryFile('w+') as f:\n    f.write('text')\n    f.seek(0)\n    print(f.read())",
        "text",
    ),
    "temporary folder": (
        "import os, tempfile\nwith tempfile.TemporaryDirectory() as d:\n    open(d + '/a', 'w').write('x')\n"
        "    print(os.listdir(d))\nprint(os.path.exists(d))",
        "['a']\nFalse",
    ),
    "spooled file": (
        "import tempfile\nf = tempfile.SpooledTemporaryFile(max_size=10**6)\nf.write(b'abc')\nf.seek(0)\nprint(f.read())",
        "b'abc'",
    ),
    "files": (
        "import os, pathlib\np = pathlib.Path('a/b')\np.mkdir(parents=True)\n(p / 'c.txt').write_text('hello')\n"
        "os.rename('a/b/c.txt', 'a/d.txt')\nprint(sorted(map(str, pathlib.Path('a').rglob('*'))))\n"
        "os.remove('a/d.txt')\nos.removedirs('a/b')\nprint(os.path.exists('a'))",
        "['a/b', 'a/d.txt']\nFalse",
    ),
    "shutil": (
        "import os, shutil\nos.mkdir('x')\nopen('x/f', 'w').write('1')\nshutil.copyfile('x/f', 'x/g')\n"
        "shutil.move('x/g', 'h')\nshutil.rmtree('x')\nprint(os.listdir('.'))",
        "['h']",
    ),
    "links": (
        "import os\nopen('a', 'w').write('1')\nos.symlink('a', 'b')\nprint(open('b').read(), os.path.islink('b'))",
        "1 True",
    ),
    "seek and truncate": (
        "f = open('x', 'wb+')\nf.write(b'0123456789')\nf.seek(5)\nf.truncate()\nf.seek(0)\nprint(f.read())",
        "b'01234'",
    ),
    "mmap": (
        "import mmap\nopen('m', 'wb').write(bytes(4096))\nwith open('m', 'r+b') as f, mmap.mmap(f.fileno(), 0) as m:\n"
        "    m[:5] = b'hello'\nprint(open('m', 'rb').read(5))",
        "b'hello'",
    ),
    "anonymous mmap": ("import mmap\nm = mmap.mmap(-1, 13)\nm.write(b'Hello world!')\nprint(m[:5])", "b'Hello'"),
    "subprocess": (
        "import subprocess, sys\nprint(subprocess.run([sys.executable, '-S', '-c', 'print(6 * 7)'], capture_output=True,"
        " text=True).stdout.strip())",
        "42",
    ),
    "subprocess with input": (
        "import subprocess, sys\np = subprocess.Popen([sys.executable, '-S', '-c', 'print(input().upper())'], stdin=-1,"
        " stdout=-1, text=True)\nprint(p.communicate('abc\\n', timeout=10)[0].strip())",
        "ABC",
    ),
    "fork": (
        "import os\nr, w = os.pipe()\nif os.fork() == 0:\n    os.write(w, b'child')\n    os._exit(3)\n"
        "print(os.waitstatus_to_exitcode(os.wait()[1]), os.read(r, 10))",
        "3 b'child'",
    ),
    "multiprocessing": (
        "import multiprocessing as m\nm = m.get_context('fork')\na, b = m.Pipe()\n"
        "p = m.Process(target=lambda: b.send([1, 2]))\np.start()\nprint(a.recv())\np.join()\nprint(p.exitcode)",
        "[1, 2]\n0",
    ),
    "shared memory": (
        "import mmap, multiprocessing as m\nm, v = m.get_context('fork'), mmap.mmap(-1, 1000)\n"
        "def f():\n    v[2] = 7\np = m.Process(target=f)\np.start()\np.join()\nprint(list(v[:4]))",
        "[0, 0, 7, 0]",
    ),
    "simple pipe of sockets": (
        "import socket\na, b = socket.socketpair()\na.sendall(b'ping')\nprint(b.recv(4))",
        "b'ping'",
    ),
    "selectors": (
        "import os, selectors\nr, w = os.pipe()\ns = selectors.DefaultSelector()\ns.register(r, 1)\nos.write(w, b'x')\n"
        "print(len(s.select(1)))",
        "1",
    ),
    "signals": (
        "import os, signal\nsignal.signal(signal.SIGUSR1, lambda *a: print('got it'))\nos.kill(os.getpid(), signal.SIGUSR1)",
        "got it",
    ),
    "alarm": (
        "import signal, time\ndef stop(*a):\n    raise TimeoutError\nsignal.signal(signal.SIGALRM, stop)\n"
        "signal.setitimer(signal.ITIMER_REAL, 0.05)\ntry:\n    time.sleep(5)\nexcept TimeoutError:\n    print('timeout')",
        "timeout",
    ),
    "resource": (
        "import resource, sys\nresource.setrlimit(resource.RLIMIT_STACK, resource.getrlimit(resource.RLIMIT_STACK))\n"
        "sys.setrecursionlimit(10**4)\nprint(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss > 0)",
        "True",
    ),
    "deep recursion in a thread": (
        "import sys, threading\nsys.setrecursionlimit(10**5)\nthreading.stack_size(1 << 26)\n"
        "def f(n):\n    return 0 if n == 0 else 1 + f(n - 1)\n"
        "t = threading.Thread(target=lambda: print(f(20000)))\nt.start()\nt.join()",
        "20000",
    ),
    "big output": ("print('x' * 60_000)", "x" * 60_000),
    "many lines": ("for i in range(10_000):\n    print(i)", "\n".join(map(str, range(10_000)))),
    "buffered input": ("import sys\nprint(sum(map(int, sys.stdin.buffer.read().split())))", "6"),
    "lines of input": ("print(sum(int(x) for x in input().split()))", "6"),
    "open(0)": ("print(max(map(int, open(0).read().split())))", "3"),
    "sqlite": (
        "import sqlite3\nc = sqlite3.connect('x.db')\nc.execute('create table t (a)')\n"
        "c.executemany('insert into t values (?)', [(i,) for i in range(5)])\nc.commit()\n"
        "print(c.execute('select sum(a) from t').fetchone()[0])",
        "10",
    ),
    "zip": (
        "import zipfile\nwith zipfile.ZipFile('a.zip', 'w') as z:\n    z.writestr('b.txt', 'text')\n"
        "zipfile.ZipFile('a.zip').extractall('out')\nprint(open('out/b.txt').read())",
        "text",
    ),
    "compression": (
        "import bz2, gzip, lzma, zlib\nd = b'abc' * 1000\n"
        "print(all(m.decompress(m.compress(d)) == d for m in (bz2, gzip, lzma, zlib)))",
        "True",
    ),
    "pickle and json": (
        "import json, pickle\nd = {'a': [1, 2.5, None]}\npickle.dump(d, open('p', 'wb'))\n"
        "print(pickle.load(open('p', 'rb')) == json.loads(json.dumps(d)))",
        "True",
    ),
    "random and hashes": (
        "import hashlib, os, random, secrets, uuid\nrandom.seed(1)\nos.urandom(8), secrets.token_hex(4), uuid.uuid4()\n"
        "print(random.randint(1, 100), hashlib.sha256(b'').hexdigest()[:8])",
        "18 e3b0c442",
    ),
    "dates": (
        "import datetime, time\nprint(datetime.date(2024, 2, 29) + datetime.timedelta(365), time.time() > 1e9)",
        "2025-02-28 True",
    ),
    "exact numbers": (
        "from decimal import Decimal\nfrom fractions import Fraction\nprint(Decimal('0.1') * 3, Fraction(1, 3) + 1)",
        "0.3 4/3",
    ),
    "imports": (
        "import argparse, ast, bisect, collections, copy, csv, ctypes, dataclasses, enum, functools, heapq, inspect, io,"
        " itertools, logging, math, operator, queue, re, statistics, string, struct, textwrap, typing, unittest\nprint(1)",
        "1",
    ),
    "memory": ("x = bytearray(100_000_000)\nprint(len(x))", "100000000"),
    "a failing program": ("print(1)\nraise SystemExit(1)", None),
    "a pool of processes": ("import multiprocessing as m\nwith m.Pool(2) as p:\n    p.map(abs, [1])\nprint(1)", None),
    "a server": ("import socket\nsocket.create_server(('127.0.0.1', 0))\nprint(1)", None),
    "a download": ("import urllib.request\nprint(urllib.request.urlopen('http://127.0.0.1:9').status)", None),
}


@pytest.fixture(params=BACKENDS)
def sandbox(request):
    return sandbox_or_skip(request.param)


@pytest.mark.parametrize("name", PROGRAMS)
def test_ordinary_programs(sandbox, name):
    code, output = PROGRAMS[name]
    tests = {"inputs": ["1 2 3\n"], "outputs": ["1" if output is None else output]}
    assert graded(sandbox, code, tests) == float(output is not None)
