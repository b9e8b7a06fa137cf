// The stretch of time that a timeline shows: from a week to a millisecond, always within the job.

const LEAST_S = 0.001;

export class TimeWindow {
  constructor(begin, end) {
    this.begin = begin;
    this.end = end;
    this.from = begin;
    this.to = end;
    this.follows = true;
  }

  get span() {
    return this.to - this.from;
  }

  get whole() {
    return this.from <= this.begin && this.to >= this.end;
  }

  /** The job has grown: a window that follows it moves along, one that shows all of it grows too. */
  grow(begin, end) {
    const whole = this.whole, span = this.span;
    this.begin = begin;
    this.end = Math.max(end, begin + LEAST_S);
    if (whole) this.set(this.begin, this.end);
    else if (this.follows) this.set(this.end - span, this.end);
  }

  set(from, to) {
    const span = Math.min(Math.max(to - from, LEAST_S), Math.max(this.end - this.begin, LEAST_S));
    const middle = (from + to) / 2;
    this.from = Math.min(Math.max(to - from === span ? from : middle - span / 2, this.begin), this.end - span);
    this.to = this.from + span;
    this.follows = this.to >= this.end - span * 1e-6;
  }

  /** Zoom by a factor (above 1: closer) and keep one moment where it is. */
  zoom(factor, around = (this.from + this.to) / 2) {
    const span = Math.min(Math.max(this.span / factor, LEAST_S), this.end - this.begin);
    const share = (around - this.from) / this.span;
    this.set(around - share * span, around - share * span + span);
  }

  pan(seconds) {
    const span = this.span;
    const from = Math.min(Math.max(this.from + seconds, this.begin), this.end - span);
    this.from = from;
    this.to = from + span;
    this.follows = this.to >= this.end - span * 1e-6;
  }
}
