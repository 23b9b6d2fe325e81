// Where the pointer or the keyboard is, for all views of a screen: what one says, the others show.

export class Cursor {
  constructor() {
    this.watching = [];
    this.at = null;
    this.resting = null;
  }

  watch(show) {
    this.watching.push(show);
  }

  // While the pointer is on a picture; null when it leaves, and the place that the address names is shown again.
  set(at) {
    this.at = at;
    this.tell();
  }

  rest(at) {
    this.resting = at;
    this.tell();
  }

  tell() {
    for (const show of this.watching) show(this.at ?? this.resting);
  }
}
