// Numbers come from Python: asked of the server that sent this page.

class Refused extends Error {}
export class Gone extends Error {}

export class Numbers {
  // `link`: the settings were not made on this page, so what is wrong with them is left out.
  async ask(screen, settings, link) {
    return decoded(await post(`numbers/${screen}${link ? "?link" : ""}`, JSON.stringify(settings)));
  }

  // Gives the key by which an address names the file.
  async drop(file) {
    return (await post(`files?${new URLSearchParams({ name: file.name })}`, file)).key;
  }

  // Starts a comparison with these settings, and gives the key by which an address names it.
  async compare(settings) {
    return (await post("comparisons", JSON.stringify(settings))).key;
  }

  async stop() {
    await post("comparisons/stop");
  }

  async isAlive() {
    try {
      return (await fetch("alive", { cache: "no-store" })).ok;
    } catch {
      return false;
    }
  }
}

async function post(path, body) {
  let response;
  try {
    response = await fetch(path, { method: "POST", body });
  } catch {
    throw new Gone();
  }
  const answer = await response.json().catch(() => ({ cause: `the server answered ${response.status}` }));
  if (!response.ok) throw new Refused(answer.remedy ? `${answer.cause}. Try: ${answer.remedy}` : answer.cause);
  return answer;
}

const ARRAYS = { float32: Float32Array, int32: Int32Array };

export function decoded(value) {
  if (Array.isArray(value)) return value.map(decoded);
  if (value === null || typeof value !== "object") return value;
  if (value.array) {
    const bytes = Uint8Array.from(atob(value.data), (character) => character.charCodeAt(0));
    return Object.assign(new ARRAYS[value.array](bytes.buffer), { shape: value.shape });
  }
  return Object.fromEntries(Object.entries(value).map(([name, each]) => [name, decoded(each)]));
}
