// The page of all jobs.

import { get } from "./api.js";
import { fill, say } from "./dom.js";
import { jobList } from "./history.js";
import { themed } from "./palette.js";

const REFRESH_MS = 3000;

themed(document.getElementById("theme"), () => {});
const list = jobList(null), banner = document.getElementById("banner"), place = document.getElementById("jobs");
let last = "";

/** Jobs come and go seldom: the list is asked for now and then, while somebody looks at it. */
async function refresh() {
  if (!document.hidden) {
    try {
      const jobs = JSON.stringify(await get("/api/jobs"));
      banner.hidden = true;
      if (jobs !== last && !place.contains(document.activeElement)) {
        await list.load();
        last = jobs;
      }
    } catch (error) {
      trouble(error);
    }
  }
  setTimeout(refresh, REFRESH_MS);
}

function trouble(error) {
  banner.hidden = false;
  banner.classList.add("is-bad");
  say(banner, [401, 403].includes(error.status)
    ? "The viewer does not know this browser. Open the address that `holdfast web` printed; it holds the token."
    : "The viewer does not answer: `holdfast web` has ended, or the way to it is cut. Trying again…");
}

fill(place, list.root);
list.ready.catch(trouble).finally(() => place.setAttribute("aria-busy", "false"));
setTimeout(refresh, REFRESH_MS);
