"""Programs that try to break out of the sandbox, to pass without solving, or to use up the machine. `code_attacks.py` plays
them.

A program prints LEAK where it could do what it must not. None can know the number that its test expects.
"""

from __future__ import annotations

TRY = """
import ctypes, os, resource, signal, socket, sys, threading, time
CANARY, PARENT, FOLDER, PORT = {canary}, {parent}, {folder!r}, {port}
def attempt(what, work):
    try:
        found = work()
    except BaseException as error:
        print(what, 'refused:', type(error).__name__)
    else:
        print('LEAK', what, found)
libc = ctypes.CDLL(None, use_errno=True)
def call(what, result):
    print(f'{{what}} refused' if result < 0 else f'LEAK {{what}}')
"""
"""Comes first in each of `STREAMS`; the names in braces are filled in."""

STREAMS: dict[str, str] = {
    "fork bomb": """
while True:
    try: os.fork()
    except OSError: pass
""",
    "fork bomb of programs that exit at once": """
while True:
    try:
        if os.fork() == 0: os._exit(0)
    except OSError: pass
""",
    "thread bomb": """
while True:
    try: threading.Thread(target=time.sleep, args=(99,)).start()
    except BaseException: pass
""",
    "endless loop": """
while True: pass
""",
    "endless loop that catches everything": """
while True:
    try:
        while True: pass
    except BaseException: pass
""",
    "sleep": """
time.sleep(1000)
""",
    "stops itself": """
os.kill(os.getpid(), signal.SIGSTOP)
""",
    "ignores signals": """
for s in range(1, 65):
    try: signal.signal(s, signal.SIG_IGN)
    except (OSError, ValueError): pass
while True: pass
""",
    "10 GB of output": """
block = b'x' * (1 << 20)
for _ in range(10 << 10): os.write(1, block)
""",
    "10 GB of errors": """
block = b'x' * (1 << 20)
for _ in range(10 << 10): os.write(2, block)
""",
    "10 GB of memory at once": """
attempt('memory', lambda: len(bytearray(10 << 30)))
""",
    "10 GB of memory in pieces": """
kept = []
for _ in range(10 << 10): kept.append(b'x' * (1 << 20))
print('LEAK')
""",
    "memory that no process holds": """
def grow():
    kept = []
    for i in range(100):
        one = os.memfd_create(str(i)); os.write(one, b'x' * (7 << 20)); kept.append(one)
    return len(kept)
attempt('memfd', grow)
call('shmget', libc.shmget(0, 1 << 30, 0o1600))
""",
    "memory of many processes": """
for _ in range(100):
    try:
        if os.fork() == 0:
            kept = b'x' * (150 << 20); time.sleep(50)
    except OSError: break
""",
    "fills the scratch folder": """
def fill():
    for i in range(200):
        with open(f'f{i}', 'wb') as f: f.write(b'x' * (7 << 20))
    return 'all'
attempt('files', fill)
time.sleep(0.5)
print('LEAK' if len(os.listdir('.')) >= 200 else '')
""",
    "a large file": """
signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
attempt('file', lambda: open('f', 'wb').truncate(1 << 30))
""",
    "a hundred thousand files": """
def fill():
    for i in range(100_000): open(f'f{i}', 'w').close()
    return 'all'
attempt('files', fill)
""",
    "folders in folders": """
for _ in range(3000):
    try: os.mkdir('d' * 200); os.chdir('d' * 200)
    except OSError: break
""",
    "folders without rights": """
os.makedirs('a/b/c'); open('a/b/c/d', 'w').close(); os.chmod('a/b', 0); os.chmod('a', 0)
""",
    "links to outside": """
os.symlink(FOLDER, 'link'); os.symlink(FOLDER + '/secret', 'other')
attempt('link', lambda: open('other').read())
""",
    "signals to others": """
before = None
try: os.kill(CANARY, 0); print('LEAK sees the canary')
except OSError as error: before = error
if before:
    for pid in (CANARY, PARENT, os.getppid(), -1):
        for s in (signal.SIGKILL, signal.SIGSTOP, signal.SIGTERM):
            try: os.kill(pid, s)
            except OSError: pass
    call('tgkill', libc.tgkill(PARENT, PARENT, 9) if hasattr(libc, 'tgkill') else -1)
    call('pidfd', libc.pidfd_open(PARENT, 0) if hasattr(libc, 'pidfd_open') else -1)
""",
    "signals by way of a file": """
import fcntl
r, w = os.pipe()
attempt('F_SETOWN', lambda: fcntl.fcntl(r, fcntl.F_SETOWN, PARENT))
""",
    "limits of the parent": """
attempt('prlimit', lambda: resource.prlimit(PARENT, resource.RLIMIT_CPU, (1, 1)))
attempt('prlimit', lambda: resource.prlimit(os.getppid(), resource.RLIMIT_NOFILE, (0, 0)))
""",
    "limits of its own": """
for name in ('AS', 'CPU', 'FSIZE', 'NOFILE'):
    which = getattr(resource, 'RLIMIT_' + name)
    attempt(name, lambda: resource.setrlimit(which, (resource.RLIM_INFINITY, resource.RLIM_INFINITY)))
""",
    "the environment": """
print('LEAK' if 'SECRET' in str(dict(os.environ)) else 'nothing')
for name in (PARENT, os.getppid(), 'self'):
    attempt('environ', lambda: open(f'/proc/{name}/environ').read())
""",
    "files of the user": """
for name in (FOLDER + '/secret', '/root/.ssh/id_rsa', '/root/.bashrc', '/etc/passwd', '/etc/shadow'):
    attempt('open', lambda: open(name).read())
attempt('list', lambda: os.listdir(FOLDER))
attempt('list', lambda: os.listdir('/home'))
""",
    "writes outside": """
for name in (FOLDER + '/written', '/usr/written', '/written', os.__file__, '/var/tmp/written', '/sys/written'):
    attempt('write ' + name, lambda: open(name, 'a').write('x'))
attempt('delete', lambda: os.unlink(FOLDER + '/secret'))
attempt('rename', lambda: os.rename(FOLDER + '/secret', 'mine'))
attempt('hard link', lambda: os.link(FOLDER + '/secret', 'mine'))
""",
    "the network": """
def connect():
    s = socket.socket(); s.settimeout(2); s.connect(('127.0.0.1', PORT)); return s
attempt('tcp', connect)
attempt('udp', lambda: socket.socket(socket.AF_INET, socket.SOCK_DGRAM).sendto(b'x', ('127.0.0.1', 9)))
attempt('unix', lambda: socket.socket(socket.AF_UNIX).bind('\\0name'))
attempt('netlink', lambda: socket.socket(socket.AF_NETLINK))
""",
    "datagrams from a pair of sockets": """
def pair(kind):
    one, other = socket.socketpair(socket.AF_UNIX, kind)
    return one.bind(b'\\0redline')
for kind in (socket.SOCK_DGRAM, socket.SOCK_SEQPACKET, socket.SOCK_STREAM):
    attempt(str(kind), lambda: pair(kind))
""",
    "rights and times of files outside": """
for name in (FOLDER + '/secret', os.__file__):
    attempt('chmod', lambda: os.chmod(name, 0o777))
    attempt('chown', lambda: os.chown(name, os.getuid(), os.getgid()))
    attempt('utime', lambda: os.utime(name, (1, 1)))
    attempt('setxattr', lambda: os.setxattr(name, 'user.x', b'x'))
    attempt('truncate', lambda: os.truncate(name, 0))
attempt('fchmod', lambda: os.fchmod(os.open(os.__file__, os.O_RDONLY), 0o777))
""",
    "namespaces and mounts": """
for name, flag in (('users', 0x10000000), ('mounts', 0x20000), ('processes', 0x20000000)): call(name, libc.unshare(flag))
call('mount', libc.mount(b'x', b'/scratch', b'tmpfs', 0, None))
call('chroot', libc.chroot(b'.'))
call('ptrace', libc.ptrace(16, PARENT, 0, 0))
call('ptrace', libc.ptrace(16, os.getppid(), 0, 0))
attempt('setuid', lambda: os.setuid(0) if os.getuid() else 1 / 0)
attempt('mknod', lambda: os.mknod('disk', 0o60600, os.makedev(254, 0)))
""",
    "the parent's memory": """
for name in (PARENT, os.getppid(), 1):
    attempt('mem', lambda: open(f'/proc/{name}/mem', 'rb').read(1))
    attempt('maps', lambda: open(f'/proc/{name}/maps').read())
    attempt('cmdline', lambda: open(f'/proc/{name}/cmdline').read())
    attempt('fd', lambda: os.listdir(f'/proc/{name}/fd'))
""",
    "its own memory": """
import gc
needle = str(int('739') * 1000 + 107)
for one in gc.get_objects():
    if one is not globals() and needle in str(one)[:100_000]: print('LEAK', type(one))
print(len(gc.get_objects()))
""",
    "a daemon": """
if os.fork() == 0:
    os.setsid()
    if os.fork() == 0:
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        while True: time.sleep(1)
    os._exit(0)
print('gone')
""",
    "closes everything": """
os.closerange(0, 1000)
""",
    "closes its output": """
os.close(1)
os.close(2)
time.sleep(0.1)
""",
    "writes to every descriptor": """
import json, struct
for text in ({'stdout': '1', 'stderr': '', 'status': 0, 'limit': '', 'seconds': 0.1}, {'value': 1}, {'loaded': True}):
    data = json.dumps(text).encode()
    for fd in range(3, 200):
        for frame in (data + b'\\n', struct.pack('!Q', len(data)) + data):
            attempt('descriptor', lambda: os.write(fd, frame))
""",
    "ends at once": """
os._exit(0)
""",
    "a crash": """
ctypes.string_at(0)
""",
    "deep recursion": """
sys.setrecursionlimit(10**9)
def f(): return f()
f()
""",
    "other programs": """
attempt('su', lambda: 1 / (os.system('su -c id root </dev/null >/dev/null 2>&1') == 0))
attempt('mount', lambda: 1 / (os.system('mount -t tmpfs x . 2>/dev/null') == 0))
""",
}
"""Programs for a test of input and output."""

FUNCTIONS: dict[str, str] = {
    "always equal": """
class Equal:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    def __sub__(self, other): return 0
    def __abs__(self): return 0
    def __lt__(self, other): return True
    def __bool__(self): return True
def f(x): return Equal()
""",
    "an int that is always equal": """
class Sly(int):
    def __eq__(self, other): return True
    __hash__ = None
def f(x): return Sly(1)
""",
    "a list that is always equal": """
class Sly(list):
    def __eq__(self, other): return True
    __hash__ = None
def f(x): return Sly([1])
""",
    "sys.exit": """
import sys
sys.exit(0)
def f(x): return 1
""",
    "sys.exit in the call": """
import sys
def f(x): sys.exit(0)
""",
    "os._exit": """
import os
os._exit(0)
""",
    "os._exit in the call": """
import os
def f(x): os._exit(0)
""",
    "catches everything": """
try:
    raise SystemExit
except BaseException: pass
def f(x):
    try: raise SystemExit(0)
    finally: return None
""",
    "other builtins": """
import builtins
builtins.len = builtins.abs = builtins.isinstance = lambda *a: True
builtins.AssertionError = ZeroDivisionError
builtins.compile = lambda *a, **k: 1 / 0
def f(x): return 1
""",
    "another guest": """
import sys
for name, module in list(sys.modules.items()):
    if 'guest' in name:
        module._reply = lambda *a: b'{"dict": [["value", true]]}\\n'
        module.eval = lambda *a: True
        module.pack = lambda v: b'{"dict": [["value", 1]]}\\n'
def f(x): return 1
""",
    "a reply of its own": """
import os
os.write(3, b'{"dict": [["loaded", true]]}\\n' + b'{"dict": [["value", 1]]}\\n' * 50)
def f(x): return 1
""",
    "replies of every kind": """
import os
for line in (b'null', b'[]', b'{"dict": []}', b'x' * 3_000_000, b'{"dict": [["value", {"tuple": 3}]]}'):
    os.write(3, line + b'\\n')
def f(x): return 1
""",
    "looks at its callers": """
import sys
def f(x):
    frame, found = sys._getframe(), ''
    while frame: found += str(frame.f_locals)[:100_000]; frame = frame.f_back
    return 'LEAK' if str(int('739') * 1000 + 107) in found else 1
""",
    "never returns": """
def f(x):
    while True: pass
""",
    "a value without end": """
def f(x): return 'x' * (50 << 20)
""",
    "keys with one hash": """
import os
keys = ', '.join(f'[{i * (2**61 - 1)}, 0]' for i in range(1, 35_000))
os.write(3, b'{"dict": [["loaded", true]]}' + bytes([10]))
data = ('{"dict": [["value", {"dict": [' + keys + ']}]]}').encode() + bytes([10])
while data: data = data[os.write(3, data):]
def f(x): return 1
""",
    "a value inside itself": """
def f(x):
    a = []; a.append(a); return a
""",
    "a generator": """
def f(x):
    while True: yield 1
""",
    "edits the tests": """
import os, glob
for path in glob.glob('/**/*test*', recursive=False) + glob.glob('*'):
    try: open(path, 'w').write('')
    except OSError: pass
def f(x): return 1
""",
    "raises the verdict": """
class Passed(BaseException): pass
def f(x): raise Passed
""",
}
"""Programs for tests that call `f`, as calls and as asserts."""
