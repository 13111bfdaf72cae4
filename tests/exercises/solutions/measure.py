from itertools import pairwise


def measure(computation, communication, window):
    times = dict.fromkeys(["computation", "communication", "overlapped", "exposed", "idle"], 0)
    inside = [e for pair in [*computation, *communication] for e in pair]
    edges = sorted({*window, *(e for e in inside if window[0] < e < window[1])})
    for start, end in pairwise(edges):
        busy, wire = covered(computation, start, end), covered(communication, start, end)
        length = end - start
        times["computation"] += busy * length
        times["communication"] += wire * length
        times["overlapped"] += (busy and wire) * length
        times["exposed"] += (wire and not busy) * length
        times["idle"] += (not busy and not wire) * length
    return times


def covered(intervals, start, end):
    return any(a <= start and end <= b for a, b in intervals)
